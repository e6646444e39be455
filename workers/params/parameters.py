"""The parameters of one stage: flat buffers, named views, reproducible first values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pentad.schedules.passes.validation import is_validated
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.tensors import Range, Tensor, tensors
from pentad.workers.params.buckets import Cut, Place
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.router_bias import Biases

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Local(NamedTuple):
    """What a rank holds of a tensor: `ranges` of every dimension, side by side in `shape`."""

    tensor: Tensor
    ranges: list[list[Range]]

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.tensor.shape

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor."""
        for dim, ranges in enumerate(self.ranges):
            if ranges != [(0, whole.shape[dim])]:
                whole = torch.cat([whole.narrow(dim, start, end - start) for start, end in ranges], dim)
        return whole


class Piece(NamedTuple):
    """What a shard has of a rank's part of a tensor: its elements `span`, in C order."""

    local: Local
    span: slice
    values: torch.Tensor


@dataclass(frozen=True)
class Parameters:
    """Buffers of one share of a stage, all in the order of `locals`, and of the shape of a shard [buckets, part] (the
    share [1, size], where it is not cut).

    `master`, `gradient`, `m`, `v` are float32 (float64 when compute is); `compute` is what STEP makes of `master`:
    itself or its copy in the compute dtype. `weights` and `gradients` are flat and whole, what layers read and add to:
    `compute` and `gradient` are a part of them, or they are None where other stages use them too (see shards.py).
    `biases` of experts are with the share that is not theirs: all that hold the stage have them.
    """

    locals: tuple[Local, ...]
    experts: bool
    cut: Cut
    master: torch.Tensor
    compute: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor | None
    gradients: torch.Tensor | None
    biases: Biases

    @cached_property
    def kinds(self) -> list[tuple[Place, bool]]:
        """All places of the shard, and whether matrices are there, or norms."""
        norms = sum(math.prod(local.shape) for local in self.locals if len(local.shape) < 2)
        ends = (0, norms, False), (norms, self.cut.whole, True)
        return [(place, matrices) for start, end, matrices in ends for place, _ in self.cut.common(start, end)]

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> its part of a whole buffer, in its own shape."""
        found, start, flat = {}, 0, flat.view(-1)
        for local in self.locals:
            size = math.prod(local.shape)
            found[local.name] = flat[start : start + size].view(local.shape)
            start += size
        return found

    def places(self) -> Iterator[tuple[Local, Place, slice]]:
        """Of every tensor where the shard has elements of it, and which."""
        start = 0
        for local in self.locals:
            end = start + math.prod(local.shape)
            for place, span in self.cut.common(start, end):
                yield local, place, span
            start = end

    def pieces(self, shard: torch.Tensor) -> list[Piece]:
        """What a shard has of the stage's tensors."""
        return [Piece(local, span, shard[place]) for local, place, span in self.places()]

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by kind: master weights and both moments."""
        return {"model": self.master, "optimizer.m": self.m, "optimizer.v": self.v}

    def given(self) -> list[torch.Tensor]:
        """All that another rank needs to hold the same."""
        return [*self.state().values(), *([self.biases.values] if self.biases.layers else [])]

    def refresh(self) -> None:
        """Writes the compute copy from the master weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def create(
    plan: Plan,
    share: ParamShard,
    device: torch.device,
    *,
    rank: int = 0,
    blank: bool = False,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Parameters:
    """The buffers of a share on a rank. Initial values depend on the seed and the parameter's name alone, unless
    `initial` gives the full tensors by name.

    `blank` buffers hold zeros, for state that comes from elsewhere.
    """
    found, cut = locals_of(plan, share), cut_of(plan, share, rank)
    narrow = DTYPES[plan.dtype]
    wide = torch.float64 if narrow is torch.float64 else torch.float32

    def zeros(*shape: int, dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.zeros(shape or (cut.buckets, cut.part), dtype=dtype, device=device)

    # The compute weights may be a step ahead of the master's, else they can be the same.
    shared = narrow is wide and not is_validated(plan.program)
    alone = cut.parts == 1
    weights = zeros(cut.whole, dtype=narrow) if alone or plan.zero < 3 else None
    gradients = zeros(cut.whole) if alone or plan.zero < 2 else None
    compute = zeros(dtype=narrow) if weights is None else cut.shard(weights)
    gradient = zeros() if gradients is None else cut.shard(gradients)
    master = compute if shared else zeros()
    experts = plan.model.experts
    biased = () if share.experts else plan.balanced(share.stage)
    biases = Biases(biased, zeros(len(biased), experts.num_experts if experts else 0))
    moments = zeros(), zeros()
    parameters = Parameters(found, share.experts, cut, master, compute, gradient, *moments, weights, gradients, biases)
    for piece in () if blank else parameters.pieces(master):
        local = piece.local
        if initial is not None:
            part = local.of(initial[local.name])
        else:
            part = initial_values(local.tensor, plan.seed, local.ranges, device)
        piece.values.copy_(part.flatten()[piece.span])
    parameters.refresh()
    return parameters


def locals_of(plan: Plan, share: ParamShard) -> tuple[Local, ...]:
    """The parts of tensors that a share is made of."""
    rank = plan.owner(share)
    found = tensors(plan.model, *plan.layers[share.stage])
    return tuple(Local(each, each.ranges(plan.mesh, rank)) for each in found if each.experts is share.experts)


def cut_of(plan: Plan, share: ParamShard, rank: int) -> Cut:
    """The shard of a rank: that of its place among the holders."""
    size, parts = plan.size(share), plan.shards(share)
    return Cut(size, parts, plan.holders(share).index(rank), plan.buckets(share)) if parts > 1 else Cut(size)
