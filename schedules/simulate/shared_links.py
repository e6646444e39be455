"""Seconds of instructions if operations that use a link at the same time share it, and so take longer.

A rank has links of its own, each with two directions. An operation keeps a link busy for a share of its time: a
transfer for nearly all of it, the F of a stage while its layers exchange rows. Where shares u_1, u_2, ... meet on a
link, operation i runs at 1 / (1 + u_i * (the sum of the others)) of its speed: n transfers at 1/n each, and what uses
no link at full speed. An operation on several links runs at the speed of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from pentad.schedules.ir.columns import OPS, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs, instruction_seconds
from pentad.schedules.simulate.events import Events

Shares = tuple[float, ...]  # of an operation's time, by link


@dataclass(frozen=True)
class LinkShares:
    """The share of its time (0 to 1) for which an operation keeps each of its rank's links busy: by op and stage, and
    for transfers, which use one direction; all others use both. Ops that are missing use no link."""

    by_stage: dict[Op, tuple[Shares, ...]]
    transfer: Shares

    @property
    def links(self) -> int:
        """The number of links of a rank."""
        return len(self.transfer)


def shared_seconds(program: Program, events: Events, costs: Costs, shares: LinkShares) -> Array:
    """Seconds of each row of a program, for `event_times`: what it takes at these costs in a step in which links are
    shared."""
    columns = program.columns
    seconds = instruction_seconds(program, costs)
    first, second = seconds[columns.action_row][events.action], np.zeros(len(events.action))
    pairs = np.flatnonzero(columns.is_second)
    second[events.event[columns.action[pairs]]] = seconds[pairs]
    own = first + second
    longer = _longer(events, own, _uses(program, events, seconds, own, shares))
    return seconds * longer[events.event[columns.action]]


def _uses(
    program: Program, events: Events, seconds: Array, own: Array, shares: LinkShares
) -> list[list[tuple[int, float]]]:
    """By event: (link, share) of all that it uses. An overlapped pair has the mean of its two parts."""
    columns, links = program.columns, shares.links
    found: list[dict[int, float]] = [{} for _ in own]
    sends, receives = IS_SEND[columns.op], IS_RECEIVE[columns.op]
    tables = {code: shares.by_stage[op] for code, op in enumerate(OPS) if op in shares.by_stage}
    rows = np.flatnonzero(sends | receives | np.isin(columns.op, list(tables)))
    for row in rows.tolist():
        event, rank, code = int(events.event[columns.action[row]]), int(columns.rank[row]), int(columns.op[row])
        is_transfer = sends[row] or receives[row]
        if not own[event] or (is_transfer and columns.peer[row] == rank):
            continue
        weight = 1.0 if is_transfer else seconds[row] / own[event]
        directions = (int(receives[row]),) if is_transfer else (0, 1)
        for link, share in enumerate(shares.transfer if is_transfer else tables[code][columns.stage[row]]):
            for direction in directions if share else ():
                key = (rank * links + link) * 2 + direction
                found[event][key] = found[event].get(key, 0.0) + weight * share
    return [list(its.items()) for its in found]


def _longer(events: Events, own: Array, uses: list[list[tuple[int, float]]]) -> Array:
    """How many times as long as `own` each event takes, by going through the step from event to event."""
    count, graph = len(own), events.graph
    successors: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(graph.source.tolist(), graph.target.tolist(), strict=True):
        successors[source].append(target)
    missing = np.bincount(graph.target, minlength=count).tolist()
    left, speed, since, started = own.tolist(), [1.0] * count, [0.0] * count, [0.0] * count
    took, running = own.copy(), dict[int, dict[int, float]]()  # link -> event -> share
    version, ends = [0] * count, list[tuple[float, int, int]]()

    def follow(event: int, now: float) -> None:
        """Makes an event run at the speed that its links now allow."""
        left[event] -= (now - since[event]) * speed[event]
        slowest = max((1 + u * (sum(running[link].values()) - u) for link, u in uses[event]), default=1.0)
        speed[event], since[event], version[event] = 1 / slowest, now, version[event] + 1
        heappush(ends, (now + max(0.0, left[event]) * slowest, event, version[event]))

    def change(event: int, now: float, *, starts: bool) -> None:
        for link, share in uses[event]:
            its = running.setdefault(link, {})
            if starts:
                its[event] = share
            else:
                del its[event]
        beside = {other for link, _ in uses[event] for other in running[link]} - {event}
        for other in (*beside, *((event,) if starts else ())):
            follow(other, now)

    def start(event: int, now: float) -> None:
        since[event] = started[event] = now
        change(event, now, starts=True)

    for event in (event for event in range(count) if not missing[event]):
        start(event, 0.0)
    while ends:
        now, event, number = heappop(ends)
        if number != version[event]:
            continue
        took[event] = now - started[event]
        change(event, now, starts=False)
        for target in successors[event]:
            missing[target] -= 1
            if not missing[target]:
                start(target, now)
    return np.divide(took, own, out=np.ones(count), where=own > 0)
