"""Lower bounds on the seconds of a rank's actions while other lanes gather its weights and reduce its gradients.

Units of an action that find no room are gathered, or reduced, between its start and its end. Where a forward is
interleaved with a backward, so that two units are read at once, there may be no room to gather the next two in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pentad.orchestrator.search.layout import Layout
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.plan import ALIGNMENT
from pentad.schedules.spec.tensors import TILE_ELEMENTS

_READS, _ADDS = op_mask({Op.F, Op.B, Op.BW}), op_mask({Op.W, Op.BW})
BUFFERED = 2  # units whose gradients have room at once, if they are reduced after every microbatch


@dataclass(frozen=True, eq=False)
class Lanes:
    """With ZeRO-3 a rank has `room` for the weights of this many units (None: all, gathered once). If `is_often`,
    gradients are reduced after every action that adds to them."""

    layout: Layout
    costs: Costs
    room: int | None
    is_often: bool

    def rank_seconds(self, program: Program, rank: int, seconds: Array) -> float:
        """Seconds of all actions of a rank in an order of stages; `seconds` are those of its actions, by stage or by
        unit."""
        columns, rows = program.columns, slice(*program.columns.rank_offsets[rank : rank + 2])
        op, stage, is_second = columns.op[rows], columns.stage[rows], columns.is_second[rows]
        code = 4 * stage + 2 * _READS[op] + _ADDS[op] + 1
        first = np.flatnonzero(~is_second)
        second = np.append(is_second[1:] * code[1:], 0)[first]  # the second action of a pair, or 0
        if len(seconds) > len(first):
            units = np.array((0, *self.layout.units.counts))
            counts = np.maximum(units[stage[first] + 1], units[(second + 3) // 4])
            seconds = np.add.reduceat(seconds, np.cumsum(counts) - counts)
        width = 4 * program.stages + 1
        kinds, index = np.unique(code[first] * width + second, return_inverse=True)
        found = []
        for codes in (divmod(kind, width) for kind in kinds.tolist()):
            read, added = ([(each - 1) // 4 for each in codes if each and each - 1 & bit] for bit in (2, 1))
            found.append((self._waiting(read), max(self._gathered(read), self._reduced(rank, added))))
        waiting, least = np.array(found)[index].T
        return float(np.maximum(seconds + waiting, least).sum())

    def _gathered(self, stages: Sequence[int]) -> float:
        """Seconds of gathers during an action that reads these stages."""
        each = [
            self.costs.gather[unit] for stage in dict.fromkeys(stages) for unit in self.layout.units.of_stages[stage]
        ]
        return 0.0 if self.room is None or self._has_frozen else _in_turn(each, self.room)

    def _waiting(self, stages: Sequence[int]) -> float:
        """Seconds of gathers that do not overlap with compute, in an action that reads units of two stages at once."""
        if self.room is None or self._has_frozen or len(set(stages)) < 2:
            return 0.0
        forward, backward = (self.layout.units.of_stages[stage] for stage in stages)
        pairs = [*zip(forward, reversed(backward), strict=False)][1:]
        free = max(0, self.room - 2)
        return sum(_in_turn((self.costs.gather[unit] for unit in pair), free) for pair in pairs)

    def _reduced(self, rank: int, stages: Sequence[int]) -> float:
        """Seconds of reductions during an action that adds to the gradients of these stages. A pool holds at most the
        elements of the largest units."""
        units, sizes = self.layout.units, self.layout.parameters
        added = [unit for stage in stages for unit in units.of_stages[stage]]
        smallest = min((sizes[unit][0] for unit in added), default=0)
        if not self.is_often or not smallest:
            return 0.0
        largest = sorted(sizes[unit][0] for unit in units.of_ranks[rank])[-BUFFERED:]
        pool = sum(largest) + (ALIGNMENT + TILE_ELEMENTS) * self.layout.mesh.size * len(largest)
        return _in_turn((self.costs.reduce[unit] / 2 for unit in added), pool // smallest)

    @property
    def _has_frozen(self) -> bool:
        """Whether there are frozen weights, whose gathers are not counted."""
        return self.layout.work.lora is not None


def _in_turn(seconds: Iterable[float], room: int) -> float:
    """Seconds of all but the `room` longest, one after another."""
    each = sorted(seconds)
    return sum(each[: max(0, len(each) - room)])
