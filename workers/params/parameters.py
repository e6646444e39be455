"""The parameters of one stage: flat buffers, the tensors in them by name, reproducible initial values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.tensors import Range, Tensor, tensors
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.router_bias import RouterBias
from pentad.workers.params.zero_layout import ShardIndex, ZeroLayout

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class LocalTensor(NamedTuple):
    """A rank's part of a tensor: the `ranges` of every dimension, joined, have the shape `shape`."""

    tensor: Tensor
    ranges: list[list[Range]]

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_full(self) -> bool:
        return self.shape == self.tensor.shape

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """This part of the full tensor."""
        for dim, ranges in enumerate(self.ranges):
            if ranges != [(0, full.shape[dim])]:
                full = torch.cat([full.narrow(dim, start, end - start) for start, end in ranges], dim)
        return full


@dataclass(frozen=True)
class Parameters:
    """What a rank holds of a stage's parameters, experts and all else separately, in the order of `local_tensors`.

    `master`, `compute`, `gradient`, `m` and `v` are its ZeRO shard, [buckets, part] ([1, size] without ZeRO); all but
    `compute` are float32 (float64 when compute is). `compute` is a copy of `master` in the compute dtype, or `master`
    itself. Layers read `full_weights` and add to `full_gradients`, flat; `compute` and `gradient` are views of them.
    Both are None where stages share buffers (workers/runtime/zero.py). `router_bias` is not sharded; it comes with the
    parameters that are not experts', as every rank of the stage needs it.
    """

    local_tensors: tuple[LocalTensor, ...]
    layout: ZeroLayout
    master: torch.Tensor
    compute: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    full_weights: torch.Tensor | None
    full_gradients: torch.Tensor | None
    router_bias: RouterBias

    @cached_property
    def decay_groups(self) -> list[tuple[ShardIndex, bool]]:
        """All parts of the shard, with whether they hold matrices (which have weight decay) or norms."""
        norms = sum(local.size for local in self.local_tensors if len(local.shape) < 2)
        ends = (0, norms, False), (norms, self.layout.padded_size, True)
        return [(index, matrices) for start, end, matrices in ends for index, _ in self.layout.overlap(start, end)]

    def spans(self) -> Iterator[tuple[LocalTensor, int, int]]:
        """The local tensors with where each starts and ends in a full buffer."""
        start = 0
        for local in self.local_tensors:
            yield local, start, start + local.size
            start += local.size

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The local tensors in a full buffer, by name."""
        flat = flat.view(-1)
        return {local.name: flat[start:end].view(local.shape) for local, start, end in self.spans()}

    def shard_spans(self) -> Iterator[tuple[LocalTensor, ShardIndex, slice]]:
        """For each tensor with elements in the shard: where they are, and which elements of the tensor."""
        for local, start, end in self.spans():
            for index, span in self.layout.overlap(start, end):
                yield local, index, span

    def shard_parts(self, shard: torch.Tensor) -> Iterator[tuple[LocalTensor, slice, torch.Tensor]]:
        """The elements of tensors that a ZeRO shard holds: a tensor, which of its elements in C order, their values."""
        return ((local, span, shard[index]) for local, index, span in self.shard_spans())

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: master weights and both moments, by kind."""
        return {"model": self.master, "optimizer.m": self.m, "optimizer.v": self.v}

    def state_tensors(self) -> list[torch.Tensor]:
        """All that another rank needs to continue with the same parameters."""
        return [*self.state().values(), *([self.router_bias.values] if self.router_bias.layers else [])]

    def refresh(self) -> None:
        """Writes the compute copy from the master weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def create_parameters(
    plan: Plan,
    shard: ParamShard,
    device: torch.device,
    *,
    rank: int = 0,
    blank: bool = False,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Parameters:
    """The buffers of a parameter shard on a rank.

    Initial values depend only on the seed and the tensors' names; `initial` overrides them by full tensors. `blank`
    buffers are zeros, for state that comes from a checkpoint or another rank.
    """
    layout, experts = zero_layout(plan, shard, rank), plan.model.experts
    narrow = DTYPES[plan.dtype]
    wide = torch.float64 if narrow is torch.float64 else torch.float32

    def zeros(*shape: int, dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.zeros(shape or (layout.buckets, layout.part), dtype=dtype, device=device)

    unsharded = layout.num_shards == 1
    full_weights = zeros(layout.padded_size, dtype=narrow) if unsharded or plan.zero < 3 else None
    full_gradients = zeros(layout.padded_size) if unsharded or plan.zero < 2 else None
    compute = zeros(dtype=narrow) if full_weights is None else layout.shard_of(full_weights)
    # With post-validation the compute weights can be a step ahead, so they need memory of their own.
    shared = narrow is wide and not has_post_validation(plan.program)
    bias_layers = () if shard.experts else plan.router_bias_layers(shard.stage)
    parameters = Parameters(
        local_tensors=local_tensors(plan, shard),
        layout=layout,
        master=compute if shared else zeros(),
        compute=compute,
        gradient=zeros() if full_gradients is None else layout.shard_of(full_gradients),
        m=zeros(),
        v=zeros(),
        full_weights=full_weights,
        full_gradients=full_gradients,
        router_bias=RouterBias(bias_layers, zeros(len(bias_layers), experts.num_experts if experts else 0)),
    )
    for local, span, values in () if blank else parameters.shard_parts(parameters.master):
        if initial is not None:
            value = local.slice_of(initial[local.name])
        else:
            value = initial_values(local.tensor, plan.seed, local.ranges, device)
        values.copy_(value.flatten()[span])
    parameters.refresh()
    return parameters


def local_tensors(plan: Plan, shard: ParamShard) -> tuple[LocalTensor, ...]:
    """A rank's parts of the tensors in a parameter shard."""
    rank = plan.owner(shard)
    found = tensors(plan.model, *plan.layers[shard.stage])
    return tuple(LocalTensor(each, each.ranges(plan.mesh, rank)) for each in found if each.experts is shard.experts)


def zero_layout(plan: Plan, shard: ParamShard, rank: int) -> ZeroLayout:
    """How a parameter shard is cut over its holders."""
    size, num_shards = plan.size(shard), plan.num_zero_shards(shard)
    if num_shards == 1:
        return ZeroLayout(size)
    return ZeroLayout(size, num_shards, plan.holders(shard).index(rank), plan.buckets(shard))
