"""A program as a graph: what must have ended before what starts, over all ranks, lanes and communicators.

Transfers and collectives have rendezvous semantics: no buffering is assumed, so a SEND and its RECV (and the members
of a collective) are one event that starts when the last of them is reached.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, Columns, among
from pentad.schedules.ir.instruction import COLLECTIVES, Instruction, Op
from pentad.schedules.ir.lookup import IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.simulate.toposort import Graph, Levels, levels

COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
IS_COLLECTIVE = among(COLLECTIVES)
ON_COMPUTE = ~(IS_SEND | IS_RECEIVE | IS_COLLECTIVE | among(COPIES))  # runs on the compute lane
_LANE = among(COLLECTIVES) * 1 + among({Op.ALL_GATHER}) + among(COPIES) * 3  # of what is no transfer, by op
Collectives = dict[tuple[str, tuple[int, ...]], dict[int, list[int]]]


@dataclass(frozen=True)
class Events:
    """`event[unit]` is the event that a unit is part of; units are counted through all ranks, rank r's from first[r]
    on. `unit[event]` is one of the units of an event: of a transfer its send, of a collective the one of the lowest
    rank. `order` has every event behind those that it waits for."""

    first: Array
    event: Array
    unit: Array
    graph: Graph
    walked: Levels

    @property
    def order(self) -> Array:
        return self.walked.order


def events_of(program: Program, *, issued: bool = False) -> Events:
    """The events of a program whose transfers and collectives meet (see `check`).

    With `issued`, a host that waits at every compute unit, as on CPUs, also keeps what follows in the stream from
    starting before that unit has ended; without, only lanes and waits order.
    """
    columns = program.columns
    together = np.arange(len(columns.unit_row))
    sends, receives = program.lookup.transfers
    together[columns.unit[receives]] = columns.unit[sends]
    for sides in collectives(program).values():
        first, *others = sides.values()
        for rows in others:
            together[columns.unit[rows]] = columns.unit[first]
    own = together == np.arange(len(together))
    unit, event = np.flatnonzero(own), (np.cumsum(own) - 1)[together]
    edges = [_lanes(columns), _channels(program), _waits(program, issued=issued), _chain(program)]
    if issued:
        edges.append(_hosts(columns))
    earlier, later = (event[np.concatenate(ends)] for ends in zip(*edges, strict=True))
    graph = Graph(len(unit), earlier, later, program.ranks)
    return Events(columns.unit_first, event, unit, graph, levels(graph))


def proven_events(program: Program) -> Events:
    """`events_of`; raises ScheduleError where events wait for each other."""
    events = events_of(program)
    if len(events.order) < events.graph.events:
        raise ScheduleError("the program deadlocks: its events wait for each other")
    return events


def collectives(program: Program) -> Collectives:
    """Communicator of collectives, (lane, ranks) -> rank -> its rows, in order: the k-th of each meet."""
    columns = program.columns
    found: Collectives = defaultdict(lambda: defaultdict(list))
    grouped = np.array([name != "" for name in columns.groups], bool)  # a NORM without a group is a chain's
    for row in np.flatnonzero(IS_COLLECTIVE[columns.op] & grouped[columns.group]).tolist():
        key = columns.key(row)
        ranks = tuple(range(program.ranks)) if key.op is Op.NORM else program.holders(key.stage)
        found[Instruction(key.op).lane, ranks][int(columns.rank[row])].append(row)
    return {where: dict(sorted(sides.items())) for where, sides in found.items()}


def _lanes(columns: Columns) -> tuple[Array, Array]:
    """Units that follow each other on a lane that is of one rank."""
    op = columns.op[columns.unit_row]
    units = np.flatnonzero(~(IS_SEND | IS_RECEIVE)[op])
    lane = columns.rank[columns.unit_row[units]] * 4 + _LANE[op[units]]
    return following(units, lane)


def _channels(program: Program) -> tuple[Array, Array]:
    """Sends that follow each other: the lane of a receive is that of its send."""
    sends, _ = program.lookup.transfers
    return following(program.columns.unit[sends], program.lookup.channels[0])


def _chain(program: Program) -> tuple[Array, Array]:
    """Where steps are validated later, the NORM of each rank waits for that of the rank before."""
    columns = program.columns
    rows = np.flatnonzero((columns.op == CODE[Op.NORM]) & (columns.peer >= 0))
    before = program.lookup.rows(columns.peer[rows], CODE[Op.NORM], -1, np.full(len(rows), -1))
    return columns.unit[before], columns.unit[rows]


def following(units: Array, lane: Array) -> tuple[Array, Array]:
    """Units of one lane each of which is the next behind the other, in the order they are given."""
    by_lane = np.argsort(lane, kind="stable")
    units, same = units[by_lane], np.diff(lane[by_lane]) == 0
    return units[:-1][same], units[1:][same]


def _waits(program: Program, *, issued: bool) -> tuple[Array, Array]:
    columns, waited = program.columns, program.lookup.waited
    if issued:  # the host has waited for compute already
        rest = ~ON_COMPUTE.take(columns.op[waited])
        return columns.unit[waited[rest]], columns.unit[columns.wait_row[rest]]
    return columns.unit[waited], columns.unit[columns.wait_row]


def _hosts(columns: Columns) -> tuple[Array, Array]:
    """What is issued behind a compute unit, and that unit."""
    on_compute = ON_COMPUTE.take(columns.op[columns.unit_row])
    units = np.arange(len(on_compute))
    last = np.maximum.accumulate(np.where(on_compute, units, -1))
    aside = units[~on_compute & (last >= columns.unit_first[columns.rank[columns.unit_row]])]
    return last[aside], aside
