"""The parts that a rank holds of tensors and of the matrices fused into them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from pentad.schedules.spec.optimizer import fused_rows
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.tensors import Range, Tensor


class LocalTensor(NamedTuple):
    """A rank's part of a tensor: the `ranges` of every dimension, concatenated, have the shape `shape`."""

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


class LocalMatrix(NamedTuple):
    """A rank's part of a matrix [rows, columns]: `own_rows` and `own_columns`, which are the elements `start` to `end`
    of the local tensor that holds it."""

    rows: int
    columns: int
    own_rows: Range
    own_columns: Range
    start: int
    end: int


def local_tensors(plan: Plan, shard: ParamShard) -> tuple[LocalTensor, ...]:
    """A rank's parts of the tensors in a parameter shard."""
    rank = plan.owner(shard)
    return tuple(LocalTensor(each, each.ranges(plan.mesh, rank)) for each in plan.tensors(shard))


def local_matrices(local: LocalTensor) -> Iterator[LocalMatrix]:
    """The matrices of a tensor, expert by expert and in the order of its rows; all tp ranks have parts of the same
    ones."""
    *stack, row_ranges, (own_columns,) = local.ranges
    borders = pairwise(accumulate(fused_rows(local.tensor), initial=0))
    width, start = own_columns[1] - own_columns[0], 0
    fused = [(first, end, own) for (first, end), own in zip(borders, row_ranges, strict=True)]
    for _ in range(math.prod(end - first for ((first, end),) in stack)):
        for first, end, own in fused:
            size = (own[1] - own[0]) * width
            own_rows = own[0] - first, own[1] - first
            yield LocalMatrix(end - first, local.tensor.shape[-1], own_rows, own_columns, start, start + size)
            start += size
