"""Predicts when every instruction of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import exp, inf
from random import Random
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import OPS, Array
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.instruction import Instruction, Key
from pentad.schedules.ir.lookup import IS_COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import Events, proven_events
from pentad.schedules.simulate.interference import Clock
from pentad.schedules.simulate.seconds import seconds
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.simulate.toposort import times


class Times(NamedTuple):
    """`starts[event]` and `ends[event]`; `middles[event]` is where an overlapped pair turns from F to B, and the end
    of all others."""

    starts: Array
    ends: Array
    middles: Array


def simulate(program: Program, costs: Costs, *, step: int = 0, jitter: float = 0.0, seed: int = 0) -> Timeline:
    """Every event starts when all it waits for has ended and lasts as long as it costs.

    With `jitter`, every compute instruction takes its time times a log-normal factor of mean 1 and that sigma, the same
    for the same seed, rank and instruction. The program must have passed `check`; compute-only programs are simulated
    once their transfers are added. Raises PentadError on costs that are not of the program's ranks.
    """
    with gc_paused():
        events = proven_events(program)
        rows = _rows(program, step, events, times_of(program, events, costs, jitter=jitter, seed=seed))
        # as Span._make does, less a call of Python for each
        return Timeline("simulated", tuple(map(partial(tuple.__new__, Span), rows)))


def times_of(program: Program, events: Events, costs: Costs, *, jitter: float = 0.0, seed: int = 0) -> Times:
    """When every event of a program starts and ends (see `simulate`)."""
    costs.require(program.ranks)
    if not 0 <= jitter < inf:
        raise PentadError(f"jitter is {jitter}, but it must be finite and at least 0")
    columns = program.columns
    each = seconds(program, costs)
    if jitter:
        for row in columns.rows_of(IS_COMPUTE).tolist():
            each[row] *= factor(seed, int(columns.rank[row]), columns.key(row), jitter)
    pairs = np.flatnonzero(columns.second)
    second = np.zeros(len(columns.unit_row))
    second[columns.unit[pairs]] = each[pairs]
    alone, second = each[columns.unit_row][events.unit], second[events.unit]
    if costs.overlap:
        return Times(*Clock(program, events, alone, second, costs.overlap).run())
    starts, ends = times(events.graph, events.walked, alone, second)
    return Times(starts, ends, starts + alone)


def factor(seed: int, rank: int, key: Key | Instruction, jitter: float) -> float:
    """Log-normal with mean 1; nothing but the arguments decides it."""
    name = Key(*key[:3])
    return exp(Random(f"{seed} {rank} {name}").gauss(-jitter * jitter / 2, jitter))


def _rows(program: Program, step: int, events: Events, times: Times) -> Iterator[tuple]:
    """The fields of a span for every row."""
    columns = program.columns
    event, pairs = events.event[columns.unit], np.flatnonzero(columns.second)
    starts, ends = times.starts[event], times.ends[event]
    starts[pairs] = ends[pairs - 1] = times.middles[event[pairs]]
    kinds = zip(columns.op.tolist(), columns.stage.tolist(), columns.peer.tolist(), strict=True)
    said = _Words().of(kinds)
    digits = [*map(str, range(program.lookup.numbers)), ""]  # by microbatch: -1 has none
    mb = columns.microbatch.tolist()
    lanes, names, ops = zip(*said, strict=True)
    return zip(
        [step] * columns.rows, columns.rank.tolist(), lanes,
        [name + digits[number] for name, number in zip(names, mb, strict=True)], ops,
        columns.stage.tolist(), mb, columns.peer.tolist(), starts.tolist(), ends.tolist(), strict=True,
    )  # fmt: skip


class _Words(dict[tuple[int, int, int], tuple[str, str, str]]):
    """(op, stage, peer) -> lane, name without its microbatch, op: each made once."""

    def __missing__(self, kind: tuple[int, int, int]) -> tuple[str, str, str]:
        op, stage, peer = kind
        part = Instruction(OPS[op], stage, peer=peer)
        self[kind] = said = part.lane, str(part.key), part.op.value
        return said

    def of(self, kinds: Iterator[tuple[int, int, int]]) -> list[tuple[str, str, str]]:
        return [self[kind] for kind in kinds]
