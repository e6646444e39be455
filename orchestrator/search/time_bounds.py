"""Lower bounds on the time of a setting's plans, without compiling them: the compute order is simulated on its own.

Then the rank's other duties are added: gathers and reductions, recomputation, copies, the update. Where a lane runs
these, its total time bounds the step as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from pentad.orchestrator.search.collective_bounds import BUFFERED, Lanes
from pentad.orchestrator.search.layout import Layout, Work
from pentad.orchestrator.search.offload_bounds import Copies
from pentad.orchestrator.search.space import Order, Setting
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.recompute import add_recompute
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_times
from pentad.schedules.spec.plan import ALIGNMENT
from pentad.schedules.spec.tensors import TILE_ELEMENTS

_FORWARD, _BACKWARD = op_mask({Op.F}), op_mask({Op.B, Op.BW})
_ADDS, _READS = op_mask({Op.W, Op.BW}), op_mask({Op.F, Op.B, Op.BW})  # adds to gradients; reads weights


def update_seconds(work: Work, costs: Costs) -> float:
    """Seconds after the last reduction; 0 with post-validation, which need not wait for NORM and STEP."""
    return 0.0 if work.config.schedule.post_validation else costs.norm + costs.step


@dataclass(frozen=True, eq=False)
class Timed:
    """A compute order, simulated with the costs of a layout and free transfers between its actions. Its parts are
    stages; or units, if forwards are interleaved with backwards, as units then end in another order."""

    layout: Layout
    order: Order
    microbatches: int

    @cached_property
    def program(self) -> Program:
        """As `compile_program` generates it. Raises PentadError for sizes that the schedule does not allow."""
        ranks, work, order = len(self.layout.placement), self.layout.work, self.order
        if "costs" not in CATALOGUE[order.name].accepts:
            return work.order(order, ranks, self.microbatches, self.layout.piece.slices)
        return generate(order.name, ranks, self.microbatches, order.options, self.layout.of_order)

    @cached_property
    def first_alike(self) -> Order:
        """The first schedule with this compute order that the layout was asked for."""
        columns = self.program.columns
        rows = tuple(each.tobytes() for each in (columns.action, columns.op, columns.stage, columns.microbatch))
        return self.layout.orders.setdefault(rows, self.order)

    @cached_property
    def _known(self) -> dict[tuple[bool, int | None, bool], float]:
        return {}

    @cached_property
    def has_pairs(self) -> bool:
        return bool(self.program.columns.is_second.any())

    @cached_property
    def splits(self) -> bool:
        """Whether the last action to add to gradients is a W."""
        return not (self.program.columns.op == CODE[Op.BW]).any()

    @cached_property
    def copies(self) -> Copies:
        """Copies to the host and back, without recomputation."""
        if "costs" in CATALOGUE[self.order.name].accepts:
            return self.layout.work.copies(self.program, self.layout.units)
        ranks, slices = len(self.layout.placement), self.layout.piece.slices
        return self.layout.work.copies_of(self.order, ranks, self.microbatches, slices, self.layout.units)

    @property
    def of_units(self) -> Program:
        return self.copies.program

    @property
    def of_parts(self) -> Program:
        return self.of_units if self.has_pairs else self.program

    @cached_property
    def units_of_parts(self) -> list[range]:
        units = [range(unit, unit + 1) for unit in range(len(self.layout.units.layers))]
        return units if self.has_pairs else self.layout.units.of_stages

    @cached_property
    def costs(self) -> Costs:
        """The costs of parts, including the launches of all their units."""
        costs, launch = self.layout.of_stages, self.layout.plain.launch
        if self.has_pairs:
            return self.layout.plain

        def launched(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                each + (count - 1) * launch for each, count in zip(values, self.layout.units.counts, strict=True)
            )

        return Costs(
            launched(costs.forward),
            launched(costs.backward),
            launched(costs.weight) if self.splits else costs.weight,  # a BW has one launch for both
            costs.transfer,
            launch=launch,
        )

    @cached_property
    def ranks(self) -> list[RankTimes]:
        starts, ends = action_times(self.of_parts, self.costs)
        columns, placement = self.of_parts.columns, self.of_parts.placement
        actions = pairwise(columns.action_offsets.tolist())
        found = []
        for held, (first, end), span in zip(placement, actions, pairwise(columns.rank_offsets.tolist()), strict=True):
            rows = slice(*span)
            times = columns.action[rows] - first, starts[first:end], ends[first:end]
            found.append(RankTimes(held, columns.stage[rows], columns.op[rows], columns.microbatch[rows], *times))
        return found

    @cached_property
    def reduces_often(self) -> bool:
        """Whether ZeRO-2 and 3 reduce after every microbatch: as configured, or because more than two units of a rank
        would have gradients at once."""
        given = self.layout.work.config.zero.reduce
        if given is not None:
            return given == "microbatch"
        return any(self._fills_buffers(rank) for rank in self.ranks)

    def _fills_buffers(self, rank: RankTimes) -> bool:
        """Whether the gradients that a rank accumulates at once, with those being reduced just before, exceed its two
        largest units, padding aside."""
        layout = self.layout
        sizes = {unit: layout.parameters[unit] for part in rank.held for unit in self.units_of_parts[part]}
        fp8 = layout.work.fp8
        alignment = ALIGNMENT if fp8 is None or not fp8.gathers else ALIGNMENT + TILE_ELEMENTS
        padding = alignment * layout.mesh.size * len(sizes)
        for parts, reduced in rank.accumulating:
            units = [unit for part in parts for unit in self.units_of_parts[part]]
            units += [self.units_of_parts[part][0] for part in reduced]  # the one reduced last
            for kind in (0, 1):
                largest = sorted(size[kind] for size in sizes.values())[-BUFFERED:]
                if sum(sizes[unit][kind] for unit in units) > sum(largest) + padding:
                    return True
        return False

    @cached_property
    def end(self) -> float:
        """The last end of an action; the first starts at 0."""
        return max(float(rank.ends[-1]) for rank in self.ranks)

    def bound(self, zero: int, max_gathered: int | None) -> float:
        """The bound without recomputation and offloading."""
        room = self._room(max_gathered) if zero == 3 else None
        key = zero > 0, room, zero > 1 and self.reduces_often
        if key not in self._known:
            self._known[key] = self._bound(*key)
        return self._known[key]

    def _room(self, max_gathered: int | None) -> int | None:
        """Units that a rank with ZeRO-3 keeps gathered at once; None: all of them."""
        room = self.layout.gathered(max_gathered)
        return None if room is None or room >= max(map(len, self.layout.units.of_ranks)) else room

    def _bound(self, is_zero: bool, room: int | None, is_often: bool) -> float:
        layout, is_zero = self.layout, is_zero and self.layout.is_shared
        costs = layout.sharded if is_zero else layout.plain
        if not layout.is_shared:
            return self.end + update_seconds(layout.work, costs)
        most, begin = self.end, 0.0
        if is_zero:
            begin = layout.first_wait
        for rank in self.ranks:
            most = max(most, self._reduced(rank, costs, layout.last_scatters if is_zero else costs.reduce))
            if is_often:
                each = sum(costs.reduce[unit] for part in rank.held for unit in self.units_of_parts[part]) / 2
                most = max(most, rank.first_backward + self.program.microbatches * each / layout.holders)
            if is_zero:
                most = max(most, self._gathered(rank, costs, room) - begin)
        if is_zero and (is_often or room is not None):
            lanes = Lanes(layout, costs, room, is_often=is_often and self.program.slices == 1)
            for number, rank in enumerate(self.ranks):
                most = max(most, float(rank.starts[0]) + lanes.rank_seconds(self.program, number, rank.seconds))
        return begin + most + update_seconds(layout.work, costs)

    def bound_with(self, plain: float, setting: Setting) -> float:
        """The bound of a setting that recomputes or offloads; `plain` is that of the same setting without either."""
        layout, most = self.layout, plain
        again = self._recomputed(setting) if setting.recompute != "none" else None
        moved = layout.offload(setting.recompute, setting.offload) if setting.offload and not self.has_pairs else None
        pieces = self.program.microbatches * self.program.slices
        for rank, units in zip(self.ranks, layout.units.of_ranks, strict=True):
            seconds = float(rank.starts[0]) + rank.work
            if again is not None:
                seconds += pieces * sum(again[unit] for unit in units) / layout.holders
            if moved is not None:
                seconds = max(seconds, self._copied(rank, moved))
            most = max(most, seconds + update_seconds(layout.work, layout.sharded))
        return most

    def simulated_with(self, setting: Setting) -> float:
        """A bound from simulating the compute order with a setting's recomputation and copies, and the reductions that
        follow; 0 if it has neither."""
        if setting.recompute == "none" and not setting.offload:
            return 0.0
        units, layout = self.units_of_parts, self.layout
        if setting.offload:
            units = [range(unit, unit + 1) for unit in range(self.of_units.stages)]
            program, starts, end = self._beside_copies(units, setting)
        else:
            program, costs = self._recomputing(self.of_parts, units, self.costs, setting)
            starts, ends = action_times(program, costs)
            end = float(ends.max())
        if not layout.is_shared:
            return end + update_seconds(layout.work, layout.plain)
        costs, reduce, wait = layout.plain, layout.plain.reduce, 0.0
        if setting.zero:
            costs, reduce, wait = layout.sharded, layout.last_scatters, layout.first_wait
        end = max(end, _last_reduction(program, units, starts, reduce, self._recomputed(setting)))
        return wait + end + update_seconds(layout.work, costs)

    def _beside_copies(self, units: Sequence[range], setting: Setting) -> tuple[Program, Array, float]:
        copies, costs = self.copies, self.layout.plain
        if setting.recompute != "none":
            program, costs = self._recomputing(copies.program, units, costs, setting)
            copies = replace(copies, program=program, stages=None)
        costs = replace(costs, offload=tuple(self.layout.offload(setting.recompute, setting.offload)))
        return copies.program, *copies.times(costs)

    def _recomputing(
        self, program: Program, units: Sequence[range], costs: Costs, setting: Setting
    ) -> tuple[Program, Costs]:
        """A program whose parts have these units, and its costs, with the recomputation of a setting."""
        by_unit, launch = self._recomputed(setting), costs.launch
        by_part = [sum(by_unit[unit] for unit in of_part) for of_part in units]
        recompute = tuple(max(0.0, seconds - launch) for seconds in by_part)  # a RECOMPUTE has its own launch
        stages = [part for part, seconds in enumerate(by_part) if seconds]
        return add_recompute(program, stages), replace(costs, recompute=recompute)

    def _recomputed(self, setting: Setting) -> list[float]:
        """Seconds to recompute each unit; only the first layers of a stage may do so."""
        seconds, layout = list(self.layout.recompute(setting.recompute)), self.layout
        if setting.recompute_layers is not None:
            for units in layout.units.of_stages:
                before = 0
                for unit in units:
                    if before >= setting.recompute_layers:
                        seconds[unit] = 0.0
                    before += len(layout.units.layers[unit].numbers)
        return seconds

    def _copied(self, rank: RankTimes, seconds: Sequence[float]) -> float:
        """A lower bound on a rank's seconds with offloading. One lane copies what units save to the host, in the order
        of forwards, and another back, in the order of backwards; the last two units of a part are left out, as their
        backward may follow too soon. What the last forward saves leaves last, and returns before what later backwards
        need. Where a backward directly follows its forward, each copy to the host ends before the first copy back
        starts; and a forward may be `_held_up`."""
        moved, waiting = [0.0] * len(self.units_of_parts), 0.0
        for part in rank.held:
            inner = [unit for unit in self.units_of_parts[part] if self.layout.units.layers[unit].numbers]
            moved[part] = sum(seconds[unit] for unit in inner[:-2])
            late, (count, turn) = self._held_up(part, seconds), rank.turns(part)
            waiting += rank.forwards(part) * late + count * max(0.0, 2 * moved[part] - turn - late)
        each = np.array(moved)
        forwards, backwards = np.flatnonzero(_FORWARD[rank.op]), np.flatnonzero(_BACKWARD[rank.op])
        last = forwards[-1]
        own = (rank.part[backwards] == rank.part[last]) & (rank.microbatch[backwards] == rank.microbatch[last])
        back = backwards[np.argmax(own) :]
        lanes = each[rank.part[forwards]].sum() + each[rank.part[back]].sum()
        return max(float(rank.starts[0]) + rank.work + waiting, float(lanes))

    def _held_up(self, part: int, seconds: Sequence[float]) -> float:
        """Seconds that a forward waits for its own copies, as a unit reuses the memory of an earlier one."""
        costs, ahead = self.layout.plain, 1 + (self.layout.work.config.memory.offload_prefetch or 1)
        computed = now = 0.0
        copied = list[float]()  # when each unit with layers has been copied
        for unit in self.units_of_parts[part]:
            has_layers, own = bool(self.layout.units.layers[unit].numbers), costs.forward[unit] + costs.launch
            now = max(now, copied[-ahead] if has_layers and len(copied) >= ahead else 0.0) + own
            computed += own
            if has_layers:
                copied.append(max([now, *copied[-1:]]) + seconds[unit])
        return now - computed

    def _reduced(self, rank: RankTimes, costs: Costs, reduce: Sequence[float]) -> float:
        """The last end of reductions, which take `reduce` by unit. Those of a part start after its last backward has
        begun, and those of later parts follow; within a part, units follow from the last to the first."""
        most = later = 0.0
        for began, ended, part in sorted((rank.last_backward(part) for part in rank.held), reverse=True):
            units = self.units_of_parts[part]
            own = sum(reduce[unit] for unit in units)
            most, rest, after = max(most, began + own + later), 0.0, ended
            for unit in units:  # the gradients of this unit are complete at `after`
                rest += reduce[unit]
                most = max(most, after + rest)
                after -= costs.weight[unit] + costs.backward[unit] * (not self.splits) + costs.launch
            later += own
        return most

    def _gathered(self, rank: RankTimes, costs: Costs, room: int | None) -> float:
        """Weights are gathered before the first forward of their unit; with ZeRO-3, a part with more units than the
        rank has room for is gathered anew in every action."""
        if self.layout.work.lora is not None:  # frozen weights are gathered as well
            return 0.0
        by_part = {part: [costs.gather[unit] for unit in self.units_of_parts[part]] for part in rank.held}
        if room is not None and sum(map(len, by_part.values())) > room:
            again = {part: sum(sorted(each)[: max(0, len(each) - room)]) for part, each in by_part.items()}
            return sum(rank.readers(part) * seconds for part, seconds in again.items())
        most, gathered = 0.0, 0.0
        for before, first, part in sorted(rank.work_before(part) for part in rank.held):
            gathered += sum(by_part[part])
            most = max(most, gathered + rank.work - before - first)
        return most


def _last_reduction(
    program: Program, units: Sequence[range], starts: Array, reduce: Sequence[float], again: Sequence[float]
) -> float:
    """A lower bound on the last end of reductions, given the starts of all actions and the seconds to reduce and to
    recompute each unit. A part's reduction follows the start of its last backward, or rather of that of its last unit,
    before which no other unit need have recomputed."""
    columns, most = program.columns, 0.0
    for held, span in zip(program.placement, pairwise(columns.rank_offsets.tolist()), strict=True):
        op, part, action = (each[slice(*span)] for each in (columns.op, columns.stage, columns.action))
        last = [action[np.flatnonzero((part == each) & _ADDS[op])[-1]] for each in held]
        reducing = 0.0
        for began, each in sorted(zip(starts[last].tolist(), held, strict=True), reverse=True):
            reducing += sum(reduce[unit] for unit in units[each])
            most = max(most, began - sum(again[unit] for unit in units[each][:-1]) + reducing)
    return most


@dataclass(frozen=True, eq=False)
class RankTimes:
    """The parts of a rank, the rows of its compute order, and the start and end of its actions."""

    held: tuple[int, ...]
    part: Array
    op: Array
    microbatch: Array
    action: Array
    starts: Array
    ends: Array

    @cached_property
    def seconds(self) -> Array:
        return self.ends - self.starts

    @cached_property
    def work(self) -> float:
        return float(self.seconds.sum())

    def last_backward(self, part: int) -> tuple[float, float, int]:
        """(start, end, part) of the last action that adds to a part's gradients."""
        action = self.action[np.flatnonzero((self.part == part) & _ADDS[self.op])[-1]]
        return float(self.starts[action]), float(self.ends[action]), part

    @cached_property
    def first_backward(self) -> float:
        return float(self.starts[self.action[np.argmax(_ADDS[self.op])]])

    @property
    def accumulating(self) -> Iterator[tuple[list[int], list[int]]]:
        """For the moment at which each part begins to have gradients: the parts between their first and last
        microbatch, and the part whose last microbatch came just before, if any."""
        spans = {part: np.flatnonzero((self.part == part) & _ADDS[self.op])[[0, -1]] for part in self.held}
        for begin, end in spans.values():
            ended = {int(other[1]): each for each, other in spans.items() if other[1] < begin < end}
            running = [each for each, (first, last) in spans.items() if first <= begin < last]
            yield running, [ended[max(ended)]] if ended else []

    def turns(self, part: int) -> tuple[int, float]:
        """How often the backward of a piece directly follows its forward, and the most seconds of such a pair."""
        same = (self.part[1:] == part) & (self.part[:-1] == part) & (self.microbatch[1:] == self.microbatch[:-1])
        rows = np.flatnonzero(same & _FORWARD[self.op[:-1]] & _BACKWARD[self.op[1:]])
        pairs = self.seconds[self.action[rows]] + self.seconds[self.action[rows + 1]]
        return len(rows), float(pairs.max(initial=0.0))

    def forwards(self, part: int) -> int:
        return int(((self.part == part) & _FORWARD[self.op]).sum())

    def readers(self, part: int) -> int:
        """Actions that read a part's weights."""
        return int(((self.part == part) & _READS[self.op]).sum())

    def work_before(self, part: int) -> tuple[float, float, int]:
        """(seconds of the actions before the first one of a part, seconds of that one, part)."""
        action = self.action[np.argmax(self.part == part)]
        return float(self.seconds[:action].sum()), float(self.seconds[action]), part
