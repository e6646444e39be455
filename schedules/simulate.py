"""Predicts when every instruction of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import exp, inf
from random import Random
from typing import NamedTuple

from pentad.schedules.costs import Costs
from pentad.schedules.errors import PentadError
from pentad.schedules.events import Events, events_of
from pentad.schedules.instruction import COMPUTE, Instruction
from pentad.schedules.interference import Clock
from pentad.schedules.program import Program, Stream
from pentad.schedules.timeline import Span, Timeline
from pentad.schedules.uncollected import uncollected


class Times(NamedTuple):
    """`starts[event]` and `ends[event]`; `middles[event]` is where an overlapped pair turns from F to B."""

    starts: list[float]
    ends: list[float]
    middles: dict[int, float]


def simulate(program: Program, costs: Costs, *, step: int = 0, jitter: float = 0.0, seed: int = 0) -> Timeline:
    """Every event starts when all it waits for has ended and lasts as long as it costs.

    With `jitter`, every compute instruction takes its time times a log-normal factor of mean 1 and that sigma, the same
    for the same seed, rank and instruction. The program must have passed `check`; compute-only programs are simulated
    once their transfers are added. Raises PentadError on costs that are not of the program's ranks.
    """
    with uncollected():
        events = events_of(program)
        times = times_of(program, events, costs, jitter=jitter, seed=seed)
        rows = chain.from_iterable(
            _rows(stream, rank, step, program.pieces, events.event[first : first + len(stream)], times)
            for rank, (first, stream) in enumerate(zip(events.first, program.streams, strict=True))
        )
        # as Span._make does, less a call of Python for each
        return Timeline("simulated", tuple(map(partial(tuple.__new__, Span), rows)))


def times_of(program: Program, events: Events, costs: Costs, *, jitter: float = 0.0, seed: int = 0) -> Times:
    """When every event of a program starts and ends (see `simulate`)."""
    costs.require(program.ranks)
    if not 0 <= jitter < inf:
        raise PentadError(f"jitter is {jitter}, but it must be finite and at least 0")
    alone, second = _seconds(program, costs, jitter, seed)
    if costs.overlap:
        return Times(*Clock(program, events, alone, second, costs.overlap).run(events.order))
    starts, ends, middles = [0.0] * len(alone), [0.0] * (len(alone) + 1), dict[int, float]()
    before = events.before
    for here in events.order:
        start = 0.0
        for earlier in before[here]:
            if ends[earlier] > start:
                start = ends[earlier]
        starts[here] = start
        ends[here] = start + alone[here]
        if here in second:
            middles[here] = ends[here]
            ends[here] += second[here]
    return Times(starts, ends, middles)


def _seconds(program: Program, costs: Costs, jitter: float, seed: int) -> tuple[list[float], dict[int, float]]:
    """Seconds of every unit by itself: of its first part, and of the second where it is an overlapped pair."""
    alone: list[float] = []
    second: dict[int, float] = {}
    for rank, stream in enumerate(program.streams):
        known: dict[tuple, float] = {}

        def cost(part: Instruction, rank: int = rank, known: dict[tuple, float] = known) -> float:
            kind = (part[0], part[1], part[3])  # op, stage, peer
            if kind not in known:
                known[kind] = costs.on(rank, part)
            return known[kind] * factor(seed, rank, part, jitter) if jitter and part.op in COMPUTE else known[kind]

        for unit in stream:
            if isinstance(unit, Instruction):
                alone.append(cost(unit))
            else:
                second[len(alone)] = cost(unit.backward)
                alone.append(cost(unit.forward))
    return alone, second


def factor(seed: int, rank: int, part: Instruction, jitter: float) -> float:
    """Log-normal with mean 1; nothing but the arguments decides it."""
    return exp(Random(f"{seed} {rank} {part.key}").gauss(-jitter * jitter / 2, jitter))


def _rows(stream: Stream, rank: int, step: int, pieces: int, event: list[int], times: Times) -> Iterator[tuple]:
    starts, ends, middles = times
    known: dict[tuple, tuple[str, str, str]] = {}
    digits = [*map(str, range(max(pieces, len(stream)))), ""]  # by piece: -1 has none
    for here, unit in zip(event, stream, strict=True):
        start, end = starts[here], ends[here]
        for part in (unit,) if isinstance(unit, Instruction) else unit:
            op, stage, mb, peer = part[:4]
            kind = (op, stage, peer)
            if kind not in known:
                known[kind] = part.lane, str(part._replace(microbatch=-1).key), op.value
            lane, name, value = known[kind]
            until = end if part is unit or part is unit[1] else middles[here]
            yield step, rank, lane, name + digits[mb], value, stage, mb, peer, start, until
            start = until
