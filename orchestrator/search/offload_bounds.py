"""The times of a compute order whose activations are offloaded and reloaded, and what a rank holds at each row, without
compiling it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.activations.activation_peaks import run_order
from pentad.schedules.ir.columns import CODE, OPS, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload import RoundTrips, round_trips
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_levels, action_seconds, compute_graph
from pentad.schedules.simulate.toposort import Graph, Levels, earliest_times, topological_levels

COMPUTE_OPS = (Op.F, Op.B, Op.BW, Op.W)
_KINDS = np.array([COMPUTE_OPS.index(op) if op in COMPUTE_OPS else -1 for op in OPS])


class CopiedRows(NamedTuple):
    """The rows of a rank by `kind`: index of the op in COMPUTE_OPS x units + unit. For each of its copies: the unit
    that is `copied`, the row at whose start its memory is free, and the row at which it is needed again."""

    kind: Array
    copied: Array
    release: Array
    reload: Array


@dataclass(frozen=True, eq=False)
class Copies:
    """A compute order of units, of which those in `copied` are offloaded and reloaded, `prefetch` compute actions
    early. `stages`, if given, is the order of stages that it was cut from."""

    program: Program
    copied: Sequence[int]
    prefetch: int
    stages: Program | None = None

    @cached_property
    def trips(self) -> RoundTrips:
        return round_trips(self.program, self.copied, self.prefetch)

    @cached_property
    def _ordered(self) -> tuple[Array, Array, Levels]:
        """The edges of `times`, and the order of its events: actions, copies to the host, copies back."""
        columns, trips, count = self.program.columns, self.trips, len(self.trips.forward)
        graph = compute_graph(self.program, Costs.uniform(self.program.stages))  # the edges do not depend on costs
        leave = graph.events + np.arange(count)
        back, rank = leave + count, columns.rank[trips.forward]
        forward, backward = columns.action[trips.forward], columns.action[trips.backward]
        before = trips.reload - 1
        before -= columns.op[columns.action_row[before]] == CODE[Op.RECOMPUTE]  # RECOMPUTE of the backward at `reload`
        late = before < trips.release  # the others have left by then, as whatever reuses their memory waits for that
        edges = [
            (forward, leave),
            (leave, trips.release),
            (leave[late], back[late]),
            (before, back),
            (back, backward),
            _in_turn(leave, rank, forward),
            _in_turn(back, rank, backward),
        ]
        source, target = (np.concatenate(ends) for ends in zip((graph.source, graph.target), *edges, strict=True))
        if (place := self._places) is None:
            return source, target, topological_levels(self._graph(source, target, None))
        # a copy to the host right after its forward, and one back right before its backward
        places = np.concatenate((place, place[forward] + 1 / 3, place[backward] - 1 / 3))
        return source, target, Levels(np.argsort(places), [])

    @cached_property
    def _places(self) -> Array | None:
        """The places of actions in an order in which each follows what it waits for. Found for stages and expanded to
        their units, which is far faster. None where units are interleaved or recompute."""
        if self.stages is None or self.stages.columns.is_second.any():
            return None
        stages, units = self.stages.columns, self.program.units or (1,) * self.program.stages
        levels = action_levels(self.stages, compute_graph(self.stages, Costs.uniform(self.stages.stages)))
        place = np.empty(stages.rows, int)
        place[levels.order] = np.arange(stages.rows)
        counts = np.array(units)[stages.stage]
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found: Array = np.repeat(place, counts) * max(units) + number
        return found

    def rows_of_rank(self, rank: int, *, is_local: bool) -> CopiedRows:
        """`is_local` is as in `run_order`."""
        if (key := (rank, is_local)) not in self._rows:
            self._rows[key] = self._rows_of_rank(rank, is_local=is_local)
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[tuple[int, bool], CopiedRows]:
        return {}

    def _rows_of_rank(self, rank: int, *, is_local: bool) -> CopiedRows:
        columns, trips = self.program.columns, self.trips
        first, end = columns.rank_offsets[rank : rank + 2]
        own = np.flatnonzero(columns.rank[trips.forward] == rank)
        release, reload = (columns.action_row[each[own]] - first for each in (trips.release, trips.reload))
        kind = _KINDS[columns.op[first:end]] * self.program.stages + columns.stage[first:end]
        order = run_order(self.program, rank, is_local=is_local)
        return CopiedRows(kind[order], columns.stage[trips.forward[own]], release, reload)

    def _graph(self, source: Array, target: Array, delay: Array | None) -> Graph:
        events = len(self.program.columns.action_row) + 2 * len(self.trips.forward)
        return Graph(events, source, target, 3 * self.program.ranks, delay)  # three lanes a rank

    def times(self, costs: Costs) -> tuple[Array, float]:
        """The start of every action, and the last end. A rank offloads on one lane and reloads on another, in the order
        of forwards and of backwards. Whatever reuses an activation's memory waits for its copy; a reload may start once
        the compute before `reload` has ended."""
        source, target, levels = self._ordered
        delay, seconds = compute_graph(self.program, costs).delay, action_seconds(self.program, costs)
        copies = np.array(costs.offload)[self.program.columns.stage[self.trips.forward]]
        assert delay is not None
        graph = self._graph(source, target, np.append(delay, np.zeros(len(source) - len(delay))))
        lasting = np.concatenate((seconds, copies, copies))
        starts, ends = earliest_times(graph, levels, lasting, np.zeros(graph.events))
        return starts[: len(seconds)], float(ends.max())


def _in_turn(copies: Array, rank: Array, at: Array) -> tuple[Array, Array]:
    """Edges between consecutive copies of a rank."""
    order = np.argsort(at)
    same = np.diff(rank[order]) == 0
    return copies[order][:-1][same], copies[order][1:][same]
