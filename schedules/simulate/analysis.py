"""The chain of instructions that a step cannot be shorter than."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, SENDS, Unit
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import Events, proven_events
from pentad.schedules.simulate.simulate import Times, times_of

MOVES = COLLECTIVES | SENDS.keys() | RECEIVES.keys()
Place = tuple[int, int]  # a rank and an index of its stream


class Step(NamedTuple):
    """One instruction of the chain, in seconds from the start of the step, and `why` it started no sooner.

    'data': it needs what the one before it made on this rank; 'transfer': it needs what the one before it brought or
    reduced; 'order': its lane, or the slot that it fills, was taken by the one before it; 'start': nothing held it.
    """

    rank: int
    key: str
    op: str
    start: float
    end: float
    why: str


class Shares(NamedTuple):
    """Seconds of the chain by op and by rank."""

    by_op: dict[str, float]
    by_rank: dict[int, float]


def critical_path(program: Program, costs: Costs) -> tuple[Step, ...]:
    """From time 0 to the end of the last instruction without a gap: each starts when the one before it ends.

    That is the time of the whole step, with its last reduction, norm and optimizer step; where these cost nothing, it
    is the timeline's makespan. A transfer stands there by the end that came last, its sender if both came at once.
    Where several chains are as long, it is one of them.
    """
    events = proven_events(program)
    times = times_of(program, events, costs)
    by_event = np.argsort(events.event, kind="stable")
    edges = np.concatenate(([0], np.bincount(events.event).cumsum()))
    chain: list[Step] = []
    event: int | None = int(events.order[np.argmax(times.ends[events.order])])
    while event is not None:
        own = _place(events, int(events.unit[event]))
        members = [_place(events, unit) for unit in by_event[edges[event] : edges[event + 1]].tolist()]
        places = [own, *(place for place in members if place != own)]
        (rank, index), why, earlier = _held(program, events, times, places)
        chain += reversed(_steps(rank, program.streams[rank][index], times, event, why))
        event = earlier
    return tuple(reversed(chain))


def shares(path: tuple[Step, ...]) -> Shares:
    by_op: dict[str, float] = defaultdict(float)
    by_rank: dict[int, float] = defaultdict(float)
    for step in path:
        by_op[step.op] += step.end - step.start
        by_rank[step.rank] += step.end - step.start
    return Shares(dict(by_op), dict(by_rank))


def _place(events: Events, number: int) -> Place:
    rank = int(np.searchsorted(events.first, number, side="right")) - 1
    return rank, number - int(events.first[rank])


def _held(program: Program, events: Events, times: Times, places: list[Place]) -> tuple[Place, str, int | None]:
    """Which of the units of an event was held until it started, why, and by which event."""
    for rank, index in places:
        stream, first = program.streams[rank], int(events.first[rank])
        unit = stream[index]
        start = times.starts[events.event[first + index]]
        lane, waits = unit.lane, set(unit.waits)
        for place in range(index - 1, -1, -1):
            if not waits and not lane:
                break
            other, event = stream[place], int(events.event[first + place])
            met = waits.intersection(part.key for part in other.parts)
            if (met or other.lane == lane) and times.ends[event] == start:
                return (rank, index), _why(unit, other) if met else "order", event
            waits -= met
            lane = "" if other.lane == lane else lane
    return places[0], "start", None


def _why(unit: Unit, needed: Unit) -> str:
    if needed.parts[0].op in MOVES:
        return "transfer"
    return "order" if unit.parts[0].op in RECEIVES else "data"


def _steps(rank: int, unit: Unit, times: Times, event: int, why: str) -> list[Step]:
    middle = [times.middles] * (len(unit.parts) == 2)
    moments = [float(column[event]) for column in (times.starts, *middle, times.ends)]
    return [
        Step(rank, str(part.key), part.op.value, start, end, why if part is unit.parts[0] else "order")
        for part, (start, end) in zip(unit.parts, pairwise(moments), strict=True)
    ]
