"""Parameters that several tensor ranks hold: norms, routers, and key-value heads of which there are fewer than ranks.

Each rank's gradient of them is of its own tokens or query heads only. The sum over the tensor ranks is taken where all
else is summed already, just before the step's norm, in which every element counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.params.buckets import Place
from pentad.workers.params.parameters import Local, Parameters


class Copy(NamedTuple):
    """Elements `mine` of a rank's shard, which stand at `place` among all that are shared; the rank with `counts` has
    them in the norm."""

    mine: Place
    place: slice
    counts: bool


class Copies:
    """Of one flat buffer of a rank's parameters."""

    def __init__(self, plan: Plan, rank: int, parameters: Parameters) -> None:
        self.parameters = parameters
        tp, parts = plan.mesh.coordinates(rank).tp, plan.mesh.tp
        self.found: list[Copy] = []
        self.elsewhere: list[Place] = []  # copies of other stages' tensors
        self.size = start = 0
        for local in parameters.locals:
            for first, size, place, whole, counts in _shared(local, parts, tp) if parts > 1 else ():
                self._add(start + first, size, self.size + place, counts)
                self.size += whole
            end = start + math.prod(local.shape)
            if local.tensor.like:
                self.elsewhere += [place for place, _ in parameters.cut.common(start, end)]
            start = end

    def _add(self, first: int, size: int, place: int, counts: bool) -> None:
        """What of it is in the shard."""
        for mine, span in self.parameters.cut.common(first, first + size):
            self.found.append(Copy(mine, slice(place + span.start, place + span.stop), counts))

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Adds up the gradients of what is shared, over the tensor ranks."""
        if not self.size:
            return
        flat = self.parameters.gradient
        joint = flat.new_zeros(self.size)
        for copy in self.found:
            joint[copy.place] = flat[copy.mine]
        dist.all_reduce(joint, group=group)
        for copy in self.found:
            flat[copy.mine] = joint[copy.place]

    @cached_property
    def counted(self) -> list[Place]:
        """Parts of the shard that this rank counts in the norm."""
        left_out, cut = [copy.mine for copy in self.found if not copy.counts] + self.elsewhere, self.parameters.cut
        found = []
        for bucket in range(cut.buckets):
            outs = sorted((out for number, out in left_out if number == bucket), key=lambda out: out.start)
            ends = [0, *(out.stop for out in outs)], [*(out.start for out in outs), cut.part]
            found += [(bucket, slice(start, end)) for start, end in zip(*ends, strict=True) if start < end]
        return found


def _shared(local: Local, parts: int, number: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """(first, size) of elements that other tensor ranks hold as well, where they stand among `whole` such elements, and
    whether this rank counts them."""
    cuts = [cut for cut in local.tensor.cuts if cut.axis == "tp"]
    if not cuts:
        size = math.prod(local.shape)
        yield 0, size, 0, size, number == 0
    for cut in cuts:
        row, first = math.prod(local.shape[1:]), 0
        for run, (start, end) in zip(cut.runs, cut.ranges(parts, number), strict=True):
            size = (end - start) * row
            if run.units < parts:
                assert cut.dim == 0, "columns are not shared"
                copies = parts // run.units
                yield first, size, number // copies * size, run.size * row, number % copies == 0
            first += size
