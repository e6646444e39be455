"""Times that no plan of a setting can take less than, without compiling it.

The first, of a shape, divides the work of a step by the ranks. That of a placement adds the ends of the pipeline. That of a
compute order simulates it alone. To each come what a rank has to do besides: update its weights, reduce and
gather, recompute, copy. A lane that is busy for so long bounds the step as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from pentad.orchestrator.search.layout import Layout, Work
from pentad.orchestrator.search.space import Order, Setting, splits_backward
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_times
from pentad.schedules.spec.mesh import Mesh

GATHERED = 2  # units that a rank has gathered at once by default
_ADDS, _READS = op_mask({Op.W, Op.BW}), op_mask({Op.F, Op.B, Op.BW})  # to gradients; weights


def shape_bound(work: Work, mesh: Mesh, microbatches: int) -> float:
    """For any schedule: the work of a step, divided equally. Raises PentadError for sizes that do not divide."""
    inner, one_unit = Mesh(mesh.dp, 1, mesh.cp, mesh.tp, mesh.ep), work.model.layers
    layout = work.layout(inner, microbatches, Order("1f1b"), one_unit, by_layer=False)
    costs = layout.plain
    seconds = sum(costs.forward) + sum(costs.backward) + sum(costs.weight)
    return microbatches * seconds / mesh.pp


def placement_bound(layout: Layout, order: Order, microbatches: int) -> float:
    """For any order of the layout's placement: every rank waits for its first input, does its work, and after the last
    backward of a rank those of the stages before have to run, if a backward is not split."""
    costs, units = layout.of_stages, layout.units
    works, arrivals, left = [], [0.0], [0.0]
    for stage, count in enumerate(units):
        forward, backward = costs.forward[stage], costs.backward[stage] + costs.weight[stage]
        works.append(forward + backward + 2 * count * costs.launch)
        arrivals.append(arrivals[-1] + forward + count * costs.launch + costs.transfer)
        left.append(left[-1] + backward + count * costs.launch + costs.transfer)
    pieces, most, is_split = microbatches * layout.piece.slices, 0.0, splits_backward(order)
    for held in layout.placement:
        seconds = pieces * sum(works[stage] for stage in held) / layout.holders
        if layout.holders == 1:
            seconds += arrivals[min(held)] + (0.0 if is_split else left[min(held)])
        most = max(most, seconds)
    return most + _end(layout.work, layout.sharded if layout.is_shared else layout.plain)


def _end(work: Work, costs: Costs) -> float:
    """Seconds after the last reduction; with post-validation a step need not wait for them."""
    return 0.0 if work.config.schedule.post_validation else costs.norm + costs.step


@lru_cache(maxsize=1024)
def _unplanned(order: Order, ranks: int, microbatches: int, slices: int) -> Program:
    return generate(order.name, ranks, microbatches, order.options._replace(slices=slices if slices > 1 else None))


def compute_order(layout: Layout, order: Order, microbatches: int) -> Program:
    """As `compile_program` generates it."""
    ranks, slices = len(layout.placement), layout.piece.slices
    if "costs" not in CATALOGUE[order.name].accepts:
        return _unplanned(order, ranks, microbatches, slices)
    return generate(order.name, ranks, microbatches, order.options, layout.of_stages)


@dataclass(frozen=True, eq=False)
class Timed:
    """A compute order, simulated with the costs of a layout and free transfers between its actions."""

    layout: Layout
    order: Order
    program: Program

    @cached_property
    def costs(self) -> Costs:
        """Of stages, with the launches of all their units."""
        costs, launch = self.layout.of_stages, self.layout.plain.launch
        is_fused = bool((self.program.columns.op == CODE[Op.BW]).any())  # a BW has one launch for both

        def launched(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(each + (count - 1) * launch for each, count in zip(values, self.layout.units, strict=True))

        return Costs(
            launched(costs.forward),
            launched(costs.backward),
            costs.weight if is_fused else launched(costs.weight),
            costs.transfer,
            launch=launch,
        )

    @cached_property
    def has_pairs(self) -> bool:
        """Whether it interleaves a forward with a backward, whose units then end in another order."""
        return bool(self.program.columns.is_second.any())

    @cached_property
    def times(self) -> tuple[Array, Array]:
        """(start, end) of each action; with BW fused, as cheap as B and W."""
        return action_times(self.program, self.costs)

    @cached_property
    def ranks(self) -> list[RankTimes]:
        starts, ends = self.times
        columns = self.program.columns
        found = []
        for first, end in pairwise(columns.action_offsets.tolist()):
            rows = slice(columns.action_row[first], columns.action_row[end] if end < len(columns.action_row) else None)
            found.append(
                RankTimes(
                    columns.stage[rows],
                    columns.op[rows],
                    columns.action[rows] - first,
                    starts[first:end],
                    ends[first:end],
                )
            )
        return found

    def bound(self, zero: int, max_gathered: int | None) -> float:
        """Without recomputation and offloading."""
        layout, is_zero = self.layout, zero > 0 and self.layout.is_shared
        costs = layout.sharded if is_zero else layout.plain
        end = _end(layout.work, costs)
        if self.has_pairs:
            return placement_bound(layout, self.order, self.program.microbatches)
        starts, ends = self.times
        most = float(ends.max() - starts.min()) + end
        if not layout.is_shared or not costs.reduce:
            return most
        for rank, held in zip(self.ranks, layout.placement, strict=True):
            most = max(most, _reduced(layout, rank, held, costs, is_zero=is_zero) + end)
            if is_zero:
                most = max(most, _gathered(layout, rank, held, costs, zero, max_gathered) + end)
        return most

    def bound_with(self, plain: float, seconds: Sequence[float]) -> float:
        """With `plain` that without recomputation, and so many more seconds for a piece in each unit."""
        end, pieces, most = _end(self.layout.work, self.layout.sharded), self.pieces, plain
        for rank, units in zip(self.ranks, self.layout.units_of_ranks, strict=True):
            more = pieces * sum(seconds[unit] for unit in units) / self.layout.holders
            most = max(most, rank.begin + rank.work + more + end)
        return most

    @property
    def pieces(self) -> int:
        return self.program.microbatches * self.program.slices


@dataclass(frozen=True, eq=False)
class RankTimes:
    """The rows of a rank's compute order (stage, op, action), and start and end of its actions."""

    stage: Array
    op: Array
    action: Array
    starts: Array
    ends: Array

    @cached_property
    def begin(self) -> float:
        return float(self.starts[0])

    @cached_property
    def work(self) -> float:
        return float((self.ends - self.starts).sum())

    def last_weight(self, stage: int) -> float:
        """Start of the last action that adds to a stage's gradients."""
        rows = np.flatnonzero((self.stage == stage) & _ADDS[self.op])
        return float(self.starts[self.action[rows[-1]]])

    def readers(self, stage: int) -> int:
        """Actions that read a stage's weights."""
        return int(((self.stage == stage) & _READS[self.op]).sum())

    def work_before(self, stage: int) -> float:
        """Seconds of the actions before the first one of a stage."""
        action = self.action[np.argmax(self.stage == stage)]
        return float((self.ends[:action] - self.starts[:action]).sum())


def _reduced(layout: Layout, rank: RankTimes, held: Sequence[int], costs: Costs, *, is_zero: bool) -> float:
    """The gradients of a stage are reduced after its last backward has begun, and those of later stages after that."""
    share = 0.5 if is_zero else 1.0
    latest = sorted(((rank.last_weight(stage), stage) for stage in held), reverse=True)
    most = seconds = 0.0
    for began, stage in latest:
        seconds += share * sum(costs.reduce[unit] for unit in layout.units_of_stages[stage])
        most = max(most, began + seconds)
    return most


def _gathered(
    layout: Layout, rank: RankTimes, held: Sequence[int], costs: Costs, zero: int, max_gathered: int | None
) -> float:
    """Weights are gathered before the first forward of their unit; with ZeRO-3 those of a stage with more units than
    `max_gathered` anew in every action."""
    by_unit = costs.gather or tuple(each / 2 for each in costs.reduce)
    by_stage = {stage: [by_unit[unit] for unit in layout.units_of_stages[stage]] for stage in held}
    if zero == 3 and layout.holders == 1 and max(layout.units) > 1:
        room = max_gathered or GATHERED
        if sum(map(len, by_stage.values())) > room:
            return sum(rank.readers(stage) * max(0, len(each) - room) * min(each) for stage, each in by_stage.items())
    if layout.work.lora is not None:
        return 0.0
    most, gathered = 0.0, 0.0
    for before, stage in sorted((rank.work_before(stage), stage) for stage in held):
        gathered += sum(by_stage[stage])
        action = rank.action[np.argmax(rank.stage == stage)]
        rest = rank.work - before - float(rank.ends[action] - rank.starts[action])
        most = max(most, gathered + rest)
    return most
