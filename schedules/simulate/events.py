"""A program as a graph of events, over all ranks, lanes and communicators.

An event is an action of one rank, or a SEND with its RECV, or all members of a collective: these meet (rendezvous, no
buffering), so they start together, when the last of them is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array, Columns, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COLLECTIVES, OF_ALL_RANKS, Instruction, Op
from pentad.schedules.ir.lookup import IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.toposort import Graph, Levels, topological_levels

COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
IS_COLLECTIVE = op_mask(COLLECTIVES)
ON_COMPUTE_LANE = ~(IS_SEND | IS_RECEIVE | IS_COLLECTIVE | op_mask(COPIES))
# Lane by op, except transfers.
_LANE = op_mask(COLLECTIVES) * 1 + op_mask({Op.ALL_GATHER}) + op_mask({Op.OFFLOAD}) * 3 + op_mask({Op.RELOAD}) * 4
_OF_ALL_RANKS = op_mask(OF_ALL_RANKS)
Collectives = dict[tuple[str, tuple[int, ...]], dict[int, Array]]


@dataclass(frozen=True)
class Events:
    """`event[action]` is the event of an action (numbered through all ranks), and `action[event]` one of its actions:
    the send of a transfer, the lowest rank's of a collective. `order` lists every event after those it waits for."""

    event: Array
    action: Array
    graph: Graph
    levels: Levels

    @property
    def order(self) -> Array:
        return self.levels.order


def events_of(program: Program, *, blocking_host: bool = False) -> Events:
    """The events of a program whose transfers and collectives match (see `check`).

    With `blocking_host` the host waits for every compute action, as on CPUs: nothing later in the stream starts
    before it has ended. Otherwise only lanes and waits order events.
    """
    columns = program.columns
    together = np.arange(len(columns.action_row))
    sends, receives = program.lookup.transfers
    together[columns.action[receives]] = columns.action[sends]
    for rows_of_rank in collectives(program).values():
        first, *others = rows_of_rank.values()
        for rows in others:
            together[columns.action[rows]] = columns.action[first]
    leads = together == np.arange(len(together))
    action, event = np.flatnonzero(leads), (np.cumsum(leads) - 1)[together]
    edges = [_lanes(columns), _channels(program), _waits(program, blocking_host=blocking_host), _norm_chain(program)]
    if blocking_host:
        edges.append(_host_order(columns))
    source, target = (event[np.concatenate(ends)] for ends in zip(*edges, strict=True))
    graph = Graph(len(action), source, target, program.ranks)
    return Events(event, action, graph, topological_levels(graph))


def acyclic_events(program: Program) -> Events:
    """`events_of`; raises ScheduleError if they wait for one another."""
    events = events_of(program)
    if len(events.order) < events.graph.events:
        raise ScheduleError("the program deadlocks: its events wait for each other")
    return events


def collectives(program: Program) -> Collectives:
    """Communicator (lane, ranks) -> rank -> its rows in stream order; the k-th rows of all ranks meet."""
    columns = program.columns
    grouped = np.array([name != "" for name in columns.groups], bool)  # a NORM without a group is sent along a chain
    rows = np.flatnonzero(IS_COLLECTIVE[columns.op] & grouped[columns.group])
    members = [program.holders(stage) for stage in range(program.stages)] + [tuple(range(program.ranks))]
    numbers = {ranks: number for number, ranks in enumerate(dict.fromkeys(members))}
    stage = np.where(_OF_ALL_RANKS[columns.op[rows]], program.stages, columns.stage[rows])
    number = np.array([numbers[ranks] for ranks in members])[stage]
    code = (_LANE[columns.op[rows]] * len(numbers) + number) * program.ranks + columns.rank[rows]
    found: dict[tuple[str, tuple[int, ...]], dict[int, Array]] = {}
    for part in split_by(rows, code):  # by communicator, then by rank
        lane = Instruction(OPS[columns.op[part[0]]]).lane
        ranks = members[program.stages] if _OF_ALL_RANKS[columns.op[part[0]]] else members[columns.stage[part[0]]]
        found.setdefault((lane, ranks), {})[int(columns.rank[part[0]])] = part
    return found


def split_by(items: Array, group: Array) -> list[Array]:
    """The items of each group, lowest first, in the order given."""
    if not len(items):
        return []
    order = np.argsort(group, kind="stable")
    return np.split(items[order], np.flatnonzero(np.diff(group[order])) + 1)


def consecutive(items: Array, group: Array) -> tuple[Array, Array]:
    """Pairs of `items` that follow each other in the same group, in the order given."""
    by_group = np.argsort(group, kind="stable")
    items, same = items[by_group], np.diff(group[by_group]) == 0
    return items[:-1][same], items[1:][same]


def _lanes(columns: Columns) -> tuple[Array, Array]:
    """Consecutive actions of each lane that has no transfers."""
    op = columns.op[columns.action_row]
    actions = np.flatnonzero(~(IS_SEND | IS_RECEIVE)[op])
    lane = columns.rank[columns.action_row[actions]] * 5 + _LANE[op[actions]]
    return consecutive(actions, lane)


def _channels(program: Program) -> tuple[Array, Array]:
    """Consecutive sends of each channel; their receives are the same events."""
    sends, _ = program.lookup.transfers
    return consecutive(program.columns.action[sends], program.lookup.channels[0])


def _norm_chain(program: Program) -> tuple[Array, Array]:
    """With post-validation, the NORM of each rank waits for that of the rank before."""
    columns = program.columns
    rows = np.flatnonzero((columns.op == CODE[Op.NORM]) & (columns.peer >= 0))
    before = program.lookup.rows(columns.peer[rows], CODE[Op.NORM], -1, np.full(len(rows), -1))
    return columns.action[before], columns.action[rows]


def _waits(program: Program, *, blocking_host: bool) -> tuple[Array, Array]:
    columns, waited = program.columns, program.lookup.wait_targets
    if blocking_host:  # the host's order covers the other waits
        rest = ~ON_COMPUTE_LANE.take(columns.op[waited])
        return columns.action[waited[rest]], columns.action[columns.wait_row[rest]]
    return columns.action[waited], columns.action[columns.wait_row]


def _host_order(columns: Columns) -> tuple[Array, Array]:
    """The last compute action before each action of another lane, and that action."""
    on_compute = ON_COMPUTE_LANE.take(columns.op[columns.action_row])
    actions = np.arange(len(on_compute))
    last = np.maximum.accumulate(np.where(on_compute, actions, -1))
    others = actions[~on_compute & (last >= columns.action_offsets[columns.rank[columns.action_row]])]
    return last[others], others
