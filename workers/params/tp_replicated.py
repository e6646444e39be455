"""Parameters replicated over tp ranks: norms, routers, and key-value heads if there are fewer of them than ranks.

Each rank's gradient covers only its own tokens or query heads. The gradients are summed over the tp ranks after all
other reductions, just before the gradient norm, which counts every element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.parameters import Parameters
from pentad.workers.rank_waits import rank_waits


class ReplicatedSlice(NamedTuple):
    """Elements `local` of this rank's shard, at `position` in the buffer of all replicated elements."""

    local: slice
    position: slice
    counts: bool  # whether this rank counts them in the gradient norm


class ReplicatedGradients:
    """The replicated parts of one flat gradient."""

    def __init__(self, plan: Plan, rank: int, parameters: Parameters) -> None:
        self.parameters = parameters
        tp, tp_rank = plan.mesh.tp, plan.mesh.coordinates(rank).tp
        self.slices: list[ReplicatedSlice] = []
        # Copies of another stage's tensors; that stage counts them.
        self.tied = [index for local, index, _ in parameters.shard_spans() if local.tensor.tied_to]
        self.size = 0
        for local, start, _ in parameters.spans() if tp > 1 else ():
            for first, size, offset, total, counts in _replicated(local, tp, tp_rank):
                position = self.size + offset
                for index, span in parameters.layout.overlap(start + first, start + first + size):
                    found = slice(position + span.start, position + span.stop)
                    self.slices.append(ReplicatedSlice(index, found, counts))
                self.size += total

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sums the replicated gradients over the tp ranks."""
        if not self.size:
            return
        gradient = self.parameters.gradient
        joined = gradient.new_zeros(self.size)
        for each in self.slices:
            joined[each.position] = gradient[each.local]
        with rank_waits.abandonable():
            dist.all_reduce(joined, group=group)
        for each in self.slices:
            gradient[each.local] = joined[each.position]

    @cached_property
    def counted(self) -> list[slice]:
        """The parts of the shard that this rank counts in the gradient norm."""
        excluded = [each.local for each in self.slices if not each.counts] + self.tied
        gaps = sorted(excluded, key=lambda span: span.start)
        ends = [*(gap.start for gap in gaps), self.parameters.layout.part]
        starts = [0, *(gap.stop for gap in gaps)]
        return [slice(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _replicated(local: LocalTensor, tp: int, tp_rank: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """(first, size, offset, total, counts) of runs of elements that other tp ranks hold, too.

    `first` is a position in the local tensor, `offset` one among the `total` such elements of all ranks; `counts`: this
    rank counts them.
    """
    splits = [split for split in local.tensor.splits if split.axis == "tp"]
    if not splits:
        yield 0, local.size, 0, local.size, tp_rank == 0
    for split in splits:
        row, first = math.prod(local.shape[1:]), 0
        for segment, (start, end) in zip(split.segments, split.ranges(tp, tp_rank), strict=True):
            size = (end - start) * row
            if segment.units < tp:
                assert split.dim == 0, "columns are never replicated"
                copies = tp // segment.units
                yield first, size, tp_rank // copies * size, segment.size * row, tp_rank % copies == 0
            first += size
