"""What bounds a step: its critical path, and its length under other costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, SENDS, Action
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.simulate import EventTimes, event_times, simulate_step_time
from pentad.schedules.simulate.toposort import grouped

COMMUNICATION = COLLECTIVES | SENDS.keys() | RECEIVES.keys()
SLOWER = 1.2
Place = tuple[int, int]  # a rank and an index in its stream


class Segment(NamedTuple):
    """One instruction of a critical path, in seconds from the start of the step, and `why` it did not start earlier.

    'data': it reads what the segment before it computed on this rank; 'transfer': it needs what the segment before it
    received or reduced; 'order': the segment before it occupied its lane, or the slot that it fills; 'start': it
    started at once.
    """

    rank: int
    key: str
    op: str
    start: float
    end: float
    why: str


class Breakdown(NamedTuple):
    """Seconds of a critical path by op and by rank."""

    by_op: dict[str, float]
    by_rank: dict[int, float]


class Scenario(NamedTuple):
    """A step under changed costs: both lengths in the unit of the costs (see `Bubble`), and by how many percent the
    makespan differs from that under the given costs."""

    name: str
    makespan: float
    longest: float
    change: float


def critical_path(program: Program, costs: Costs) -> tuple[Segment, ...]:
    """A chain from time 0 to the end of the last instruction in which each starts when the one before it ends.

    It includes the last reductions, the norm and the optimizer step; if these cost nothing its length is the makespan.
    A transfer appears as the end that arrived last, or as its send if both arrived together. If there are several
    critical paths, it is one of them.
    """
    events, columns = acyclic_events(program), program.columns
    times = event_times(program, events, costs)
    by_event, edges = grouped(events.event, events.graph.events)
    path: list[Segment] = []
    event: int | None = int(events.order[np.argmax(times.ends[events.order])])
    while event is not None:
        first, members = events.action[event], by_event[edges[event] : edges[event + 1]]
        actions = [first, *members[members != first]]
        places = [columns.position(columns.action_row[action]) for action in actions]
        (rank, index), why, earlier = _predecessor(program, events, times, places)
        path += reversed(_segments(rank, program.streams[rank][index], times, event, why))
        event = earlier
    return tuple(reversed(path))


def breakdown(path: tuple[Segment, ...]) -> Breakdown:
    by_op: dict[str, float] = defaultdict(float)
    by_rank: dict[int, float] = defaultdict(float)
    for segment in path:
        by_op[segment.op] += segment.end - segment.start
        by_rank[segment.rank] += segment.end - segment.start
    return Breakdown(dict(by_op), dict(by_rank))


def what_if(program: Program, costs: Costs) -> list[Scenario]:
    """The program under the given costs, then under changed ones. The order of instructions stays the same, although
    another order might suit the changed costs better."""
    events = acyclic_events(program)
    found: list[Scenario] = []
    for name, changed in [("as it is", costs), *_scenarios(program.ranks, costs)]:
        makespan, longest, _ = simulate_step_time(program, changed, events)
        found.append(Scenario(name, makespan, longest, 100 * (makespan / found[0].makespan - 1) if found else 0.0))
    return found


def _predecessor(
    program: Program, events: Events, times: EventTimes, places: list[Place]
) -> tuple[Place, str, int | None]:
    """Which action of an event was held up until it started, why, and by which event."""
    for rank, index in places:
        stream, first = program.streams[rank], int(program.columns.action_offsets[rank])
        action = stream[index]
        start = times.starts[events.event[first + index]]
        lane, waits = action.lane, set(action.waits)
        for at in range(index - 1, -1, -1):
            if not waits and not lane:
                break
            other, event = stream[at], int(events.event[first + at])
            needed = waits.intersection(part.key for part in other.parts)
            if (needed or other.lane == lane) and times.ends[event] == start:
                return (rank, index), _why(action, other) if needed else "order", event
            waits -= needed
            lane = "" if other.lane == lane else lane
    return places[0], "start", None


def _why(action: Action, needed: Action) -> str:
    if needed.parts[0].op in COMMUNICATION:
        return "transfer"
    return "order" if action.parts[0].op in RECEIVES else "data"


def _segments(rank: int, action: Action, times: EventTimes, event: int, why: str) -> list[Segment]:
    middle = [times.middles] * (len(action.parts) == 2)
    moments = [float(column[event]) for column in (times.starts, *middle, times.ends)]
    return [
        Segment(rank, str(part.key), part.op.value, start, end, why if part is action.parts[0] else "order")
        for part, (start, end) in zip(action.parts, pairwise(moments), strict=True)
    ]


def _scenarios(ranks: int, costs: Costs) -> Iterator[tuple[str, Costs]]:
    slowdown = costs.slowdown or (1.0,) * ranks
    for rank in range(ranks):
        factors = (*slowdown[:rank], slowdown[rank] * SLOWER, *slowdown[rank + 1 :])
        yield f"rank {rank} {SLOWER}x slower", replace(costs, slowdown=factors)
    yield "links at half speed", _with_transfers(costs, 2.0)
    yield "transfers free", _with_transfers(costs, 0.0)
    yield "launches twice as long", replace(costs, launch=2 * costs.launch)
    yield "W free", replace(costs, weight=(0.0,) * len(costs.weight))


def _with_transfers(costs: Costs, factor: float) -> Costs:
    links = tuple(tuple(seconds * factor for seconds in row) for row in costs.links)
    return replace(costs, transfer=costs.transfer * factor, links=links)
