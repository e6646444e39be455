"""Auxiliary-loss-free load balancing: a bias for each expert, moved towards an even load (arXiv 2408.15664)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import ParamShard, Plan


def updated_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """The bias [..., E] after a step that sent `load` [..., E] int64 tokens to each expert: up by `rate` below the mean
    load, down above it (arXiv 2408.15664, algorithm 1). Integers are compared, so the result does not depend on the
    mesh."""
    return bias + rate * torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load).to(bias.dtype)


class RouterBias(NamedTuple):
    """The biases of a stage's experts, `values` [layers, E]; in master precision, as a step moves them by less than
    bfloat16 resolves."""

    layers: tuple[int, ...]
    values: torch.Tensor

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The bias [E] of each layer."""
        return {f"layers.{layer}.experts.bias": row for layer, row in zip(self.layers, self.values, strict=True)}


def router_biases(plan: Plan, shard: ParamShard, dtype: torch.dtype, device: torch.device) -> RouterBias:
    """Zeros for the experts of a stage, with its parameters, or with LoRA its frozen weights, that are not experts'."""
    is_theirs = not shard.experts and shard.frozen == (plan.lora is not None)
    layers, experts = plan.router_bias_layers(shard.stage) if is_theirs else (), plan.model.experts
    return RouterBias(
        layers, torch.zeros(len(layers), experts.num_experts if experts else 0, dtype=dtype, device=device)
    )


class LoadBalancer:
    """Moves a stage's biases by `rate` a step; 0: they stay, and no load is counted.

    Layers read the bias and count into the load of `bias_and_load`, by name; `total_load` [layers, E] is that of all
    ranks in the last step.
    """

    def __init__(self, bias: RouterBias, rate: float) -> None:
        self.bias, self.layers, self.rate = bias.values, bias.layers, rate
        self.load = torch.zeros(self.bias.shape, dtype=torch.int64, device=self.bias.device)
        self.total_load = torch.zeros_like(self.load)
        named = zip(bias.by_name.items(), self.load, strict=True)
        self.bias_and_load = {name: (bias, load) for (name, bias), load in named}

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sums the load over all ranks that hold the stage, and resets the counts."""
        self.total_load.copy_(self.load)
        self.load.zero_()
        if group is not None:
            dist.all_reduce(self.total_load, group=group)

    def update(self, valid: torch.Tensor) -> None:
        """Moves the biases if the step is `valid`, a scalar bool."""
        self.bias.copy_(torch.where(valid, updated_bias(self.bias, self.total_load, self.rate), self.bias))
