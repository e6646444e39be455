"""The load of experts, and auxiliary-loss-free balancing: each expert has a bias that is moved towards an even load
(arXiv 2408.15664)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.rank_waits import rank_waits

LOAD_EVERY = 10  # ranks report the load once in so many steps


def reports_load(step: int) -> bool:
    """Whether ranks report the load of this step."""
    return step % LOAD_EVERY == 0


def updated_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """The bias [..., E] after a step that sent `load` [..., E] int64 tokens to each expert: up by `rate` if below the
    mean load, down if above it (arXiv 2408.15664, algorithm 1). Integers are compared, so the result does not depend on
    the mesh."""
    return bias + rate * torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load).to(bias.dtype)


class RouterBias(NamedTuple):
    """The biases of a stage's experts, `values` [layers, E]; in master precision, as a step moves them by less than
    bfloat16 can resolve."""

    layers: tuple[int, ...]
    values: torch.Tensor

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The bias [E] of each layer."""
        return {f"layers.{layer}.experts.bias": row for layer, row in zip(self.layers, self.values, strict=True)}


def router_biases(plan: Plan, shard: ParamShard, dtype: torch.dtype, device: torch.device) -> RouterBias:
    """Zeros for a stage's experts, if this shard is the one that holds its biases: its parameters other than experts
    or, with LoRA, its frozen weights other than experts. Otherwise empty."""
    is_theirs = not shard.experts and shard.frozen == (plan.lora is not None)
    layers, experts = plan.router_bias_layers(shard.stage) if is_theirs else (), plan.model.experts
    return RouterBias(
        layers, torch.zeros(len(layers), experts.num_experts if experts else 0, dtype=dtype, device=device)
    )


class ExpertLoad:
    """The visits of this rank's tokens to the experts of a stage's `layers`: `counts` [layers, E] int64, to which
    layers add through `by_name`."""

    def __init__(self, layers: Iterable[int], experts: int, device: torch.device) -> None:
        self.layers = tuple(layers)
        self.counts = torch.zeros((len(self.layers), experts), dtype=torch.int64, device=device)
        self.by_name = {
            f"layers.{layer}.experts.load": row for layer, row in zip(self.layers, self.counts, strict=True)
        }

    def copy(self) -> PendingLoad:
        """A copy on the host."""
        host = torch.empty(self.counts.shape, dtype=torch.int64, pin_memory=self.counts.is_cuda)
        return PendingLoad(self.layers, host.copy_(self.counts, non_blocking=True))


class PendingLoad(NamedTuple):
    """Valid once the stream that was current at `copy` has reached that point."""

    layers: tuple[int, ...]
    counts: torch.Tensor

    def read(self) -> dict[int, tuple[int, ...]]:
        """By layer."""
        return dict(zip(self.layers, map(tuple, self.counts.tolist()), strict=True))


class LoadBalancer:
    """Moves a stage's biases by `rate` a step; with 0 they stay.

    Layers read the biases in `by_name`; `total_load` [layers, E] is what all ranks have counted in the last step.
    """

    def __init__(self, bias: RouterBias, rate: float, load: ExpertLoad) -> None:
        self.bias, self.by_name, self.rate, self.load = bias.values, bias.by_name, rate, load.counts
        self.total_load = torch.zeros_like(self.load)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sums the load over all ranks that hold the stage."""
        self.total_load.copy_(self.load)
        if group is not None:
            with rank_waits.abandonable():
                dist.all_reduce(self.total_load, group=group)

    def update(self, valid: torch.Tensor) -> None:
        """Moves the biases if the step is `valid`, a scalar bool."""
        self.bias.copy_(torch.where(valid, updated_bias(self.bias, self.total_load, self.rate), self.bias))
