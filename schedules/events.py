"""A program as numbers: what `graph` says, laid out so that a million instructions are walked in seconds.

Units are numbered rank by rank in stream order. What happens together is one event, which goes by the number of one of
its units: a transfer by its send, a collective by the unit of its lowest rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pentad.schedules.graph import ranks_of
from pentad.schedules.instruction import COLLECTIVES, RECEIVES, SENDS, Instruction, Op
from pentad.schedules.order import ScheduleError
from pentad.schedules.program import Program, Stream
from pentad.schedules.validation import NORM, is_validated

NONE = -1  # the event before the first of a lane; as an index, the spare last place of a list
ASIDE = COLLECTIVES | SENDS.keys() | RECEIVES.keys() | {Op.OFFLOAD, Op.RELOAD}  # not on the compute lane


@dataclass(frozen=True)
class Events:
    """`first[rank]` is the number of a rank's first unit, `event[unit]` the event that a unit is part of.

    `before[event]` are the events that must have ended, NONE among them; `order` has every event behind those.
    """

    first: tuple[int, ...]
    event: list[int]
    before: list[tuple[int, ...]]
    order: list[int]


def events_of(program: Program) -> Events:
    """The events of a program that has passed `check`. Raises ScheduleError where events wait for each other."""
    first = tuple(accumulate(map(len, program.streams[:-1]), initial=0))
    event = _meetings(program, first)
    before: list[tuple[int, ...]] = [()] * len(event)
    for start, stream in zip(first, program.streams, strict=True):
        _wait(stream, event[start : start + len(stream)], before)
    if is_validated(program):
        norms = [start + position[NORM] for start, position in zip(first, program.positions, strict=True)]
        for earlier, later in pairwise(norms):
            before[later] += (earlier,)
    return Events(first, event, before, _ordered(event, before))


def _meetings(program: Program, first: tuple[int, ...]) -> list[int]:
    """Unit -> event: the k-th send of a channel meets its k-th receive, the k-th collective of its ranks the others."""
    event = list(range(sum(map(len, program.streams))))
    sides: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, stream in enumerate(program.streams):
        for number, unit in enumerate(stream, first[rank]):
            op = unit[0]
            if op not in ASIDE or not isinstance(unit, Instruction):
                continue
            if op in SENDS:
                sides[op, rank, unit.peer][0].append(number)
            elif op in RECEIVES:
                sides[RECEIVES[op], unit.peer, rank][1].append(number)
            elif op in COLLECTIVES and unit.group:
                sides[unit.lane, ranks_of(program, unit)][rank].append(number)
    for numbers in sides.values():
        sender, *others = (numbers[side] for side in sorted(numbers))
        for other in others:
            for one, two in zip(sender, other, strict=True):
                event[two] = one
    return event


def _wait(stream: Stream, event: list[int], before: list[tuple[int, ...]]) -> None:
    """Adds to `before` what the units of a rank wait for: the one before on their lane, and their `waits`."""
    position: dict[tuple, int] = {}  # key -> event
    compute, last = NONE, dict[object, int]()
    for here, unit in zip(event, stream, strict=True):
        keys = unit.waits
        waits = (position[keys[0]],) if len(keys) == 1 else tuple([position[key] for key in keys]) if keys else ()
        op = unit[0]
        if op not in ASIDE or not isinstance(unit, Instruction):
            before[here] = (compute, *waits)
            compute = here
        elif op in RECEIVES:
            before[here] += waits  # the lane of a receive is that of its send
        else:
            lane = (op, unit[3]) if op in SENDS else unit.lane
            before[here] += (last.get(lane, NONE), *waits)
            last[lane] = here
        if isinstance(unit, Instruction):
            position[unit[:3]] = here
        else:
            position[unit.forward[:3]] = position[unit.backward[:3]] = here


def _ordered(event: list[int], before: list[tuple[int, ...]]) -> list[int]:
    new, waiting, placed = 0, 1, 2
    state = bytearray(len(event) + 1)
    state[NONE] = placed
    order: list[int] = []
    for number, wanted in enumerate(event):
        if wanted != number or state[wanted] == placed:
            continue
        path, state[wanted] = [wanted], waiting  # each waits for the next
        while path:
            here = path[-1]
            for earlier in before[here]:
                if state[earlier] != placed:
                    if state[earlier] != new:
                        raise ScheduleError("the program deadlocks: its events wait for each other")
                    state[earlier] = waiting
                    path.append(earlier)
                    break
            else:
                state[here] = placed
                order.append(path.pop())
    return order
