"""What a page knows of a program besides its spans: what waits for what, what it keeps, what it cannot be shorter than.

Spans go by their number: their place in the page, by rank, row and time.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from pentad.schedules.draw.page_spans import drawn, zero_of
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.analysis import critical_path
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import activations_over_time
from pentad.schedules.simulate.timeline import Timeline

Numbers = dict[tuple[int, str], int]  # rank and name of an instruction -> number of its span


class Drawn(NamedTuple):
    """A program and its `simulate`d step at these costs."""

    program: Program
    costs: Costs
    timeline: Timeline


def program_payload(shown: Drawn, limit: float | None) -> dict[str, Any]:
    """`waits` has as many numbers for each span as its `count` says; `meets` are those that run as one event, the k-th
    send of a channel with its k-th receive and the members of a collective; `pairs` are the first halves of pairs,
    whose results are there when the pair ends; `slot` is -1 but for receives that have one; `critical` is the chain
    that ends last; `memory` counts in units of `unit` microbatches of a whole rank."""
    program, timeline = shown.program, shown.timeline
    spans = [span for _, rows in drawn(timeline) for _, row in rows for span in row]
    numbers = {(span.rank, span.name): number for number, span in enumerate(spans)}
    waits, slots = _waits(program, numbers)
    path = critical_path(program, shown.costs)
    return {
        "name": program.name,
        "waits": {"count": list(map(len, waits)), "number": [number for some in waits for number in some]},
        "meets": _meets(program, numbers),
        "pairs": [
            numbers[rank, str(unit.key)]
            for rank, stream in enumerate(program.streams)
            for unit in stream
            if isinstance(unit, Overlap)
        ],
        "slot": slots,
        "critical": {"number": [numbers[step.rank, step.key] for step in path], "why": [step.why for step in path]},
        "memory": _memory(program, timeline, limit),
    }


def _waits(program: Program, numbers: Numbers) -> tuple[list[list[int]], list[int]]:
    """What each span waits for besides its lane, and its slot. The first half of a pair waits for what either needs."""
    waits: list[list[int]] = [[] for _ in numbers]
    slots = [-1] * len(numbers)
    for rank, stream in enumerate(program.streams):
        known = {part.key: numbers[rank, str(part.key)] for unit in stream for part in unit.parts}
        for unit in stream:
            for part in unit.parts:
                expected = unit.waits if part is unit.parts[0] else part.waits
                waits[known[part.key]] = [known[key] for key in dict.fromkeys(expected)]
                slots[known[part.key]] = part.slot
    return waits, slots


def _meets(program: Program, numbers: Numbers) -> list[list[int]]:
    sides: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, stream in enumerate(program.streams):
        for unit in stream:
            if isinstance(unit, Instruction) and (channel := _channel(rank, unit)):
                sides[channel][rank].append(numbers[rank, str(unit.key)])
    return [list(met) for by_side in sides.values() for met in zip(*by_side.values(), strict=True) if len(met) > 1]


def _channel(rank: int, part: Instruction) -> tuple | None:
    if part.op in SENDS:
        return part.op, rank, part.peer
    if part.op in RECEIVES:
        return RECEIVES[part.op], part.peer, rank
    return (part.lane, part.group) if part.group else None


def _memory(program: Program, timeline: Timeline, limit: float | None) -> dict[str, Any]:
    unit, zero = 0.5 / (program.chunks * program.slices), zero_of(timeline)
    ranks = []
    for changes in activations_over_time(program, timeline):
        times = [round((time - zero) * 1e9) for time, _ in changes]
        gaps = [after - before for before, after in pairwise([0, *times])]
        ranks.append({"gap": gaps, "kept": [round(kept / unit) for _, kept in changes]})
    return {"unit": unit, "limit": limit, "ranks": ranks}
