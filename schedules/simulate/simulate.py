"""Predicts when every instruction of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, op_mask
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import RUNS_KERNELS, Costs, instruction_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.timeline import Bubble, Span, Timeline
from pentad.schedules.simulate.toposort import earliest_times


class EventTimes(NamedTuple):
    """By event. `middles` is where an overlapped pair changes from its forward to its backward, elsewhere the end."""

    starts: Array
    ends: Array
    middles: Array


class StepTime(NamedTuple):
    """`makespan`, `longest` and `bubble` of a simulated step, as `Timeline` defines them."""

    makespan: float
    longest: float
    bubble: Bubble


def simulate(program: Program, costs: Costs, *, step: int = 0) -> Timeline:
    """Every event starts when all that it waits for has ended, and takes what it costs.

    The program must have passed `check`. Raises PentadError on costs that do not fit its ranks.
    """
    with gc_paused():
        events = acyclic_events(program)
        rows = _span_fields(program, step, events, event_times(program, events, costs))
        # tuple.__new__ is what Span._make calls, without the Python call per span
        return Timeline("simulated", tuple(map(partial(tuple.__new__, Span), rows)))


def simulate_step_time(program: Program, costs: Costs, events: Events | None = None) -> StepTime:
    """The figures of `simulate` without its spans, which take most of the time for a large program. `events` are those
    of the program, if they are known already."""
    events = events or acyclic_events(program)
    starts, ends = _row_times(program, events, event_times(program, events, costs))
    rows = program.columns.rows_of(op_mask(RUNS_KERNELS))
    starts, ends, first = starts[rows], ends[rows], np.searchsorted(rows, program.columns.rank_offsets)
    ranks = [(starts[a:b], ends[a:b]) for a, b in pairwise(first.tolist()) if a < b]
    ranks.sort(key=lambda times: float(times[0][0]))  # the order in which Timeline adds them up, for the same bits
    longest = max(float(end[-1] - start[0]) for start, end in ranks)
    makespan = float(ends.max() - starts.min())
    busy = [float(np.cumsum(end - start)[-1]) for start, end in ranks]  # one by one, as Timeline does
    mean = sum(busy) / len(busy)
    return StepTime(makespan, longest, Bubble(1 - mean / longest, 1 - mean / makespan))


def event_times(program: Program, events: Events, costs: Costs, seconds: Array | None = None) -> EventTimes:
    """When every event of a program starts and ends (see `simulate`), if its rows take this many seconds (None: what
    they cost)."""
    costs.validate(program.ranks)
    columns = program.columns
    seconds = instruction_seconds(program, costs) if seconds is None else seconds
    pairs = np.flatnonzero(columns.is_second)
    second = np.zeros(len(columns.action_row))
    second[columns.action[pairs]] = seconds[pairs]
    first, second = seconds[columns.action_row][events.action], second[events.action]
    starts, ends = earliest_times(events.graph, events.levels, first, second)
    return EventTimes(starts, ends, starts + first)


def _row_times(program: Program, events: Events, times: EventTimes) -> tuple[Array, Array]:
    """Start and end of every row."""
    columns = program.columns
    event, pairs = events.event[columns.action], np.flatnonzero(columns.is_second)
    starts, ends = times.starts[event], times.ends[event]
    starts[pairs] = ends[pairs - 1] = times.middles[event[pairs]]
    return starts, ends


def _span_fields(program: Program, step: int, events: Events, times: EventTimes) -> Iterator[tuple]:
    """The fields of a span for every row."""
    columns = program.columns
    starts, ends = _row_times(program, events, times)
    stage, mb, peer = columns.stage.tolist(), columns.microbatch.tolist(), columns.peer.tolist()
    lanes, names, ops = zip(*map(_labels, columns.op.tolist(), stage, peer), strict=True)
    digits = [*map(str, range(program.lookup.numbers)), ""]  # by microbatch; the last is for -1
    return zip(
        [step] * columns.rows, columns.rank.tolist(), lanes,
        [name + digits[number] for name, number in zip(names, mb, strict=True)], ops,
        stage, mb, peer, starts.tolist(), ends.tolist(), strict=True,
    )  # fmt: skip


@cache
def _labels(op: int, stage: int, peer: int) -> tuple[str, str, str]:
    """Lane, name without the microbatch, and op of instructions with this op code."""
    part = Instruction(OPS[op], stage, peer=peer)
    return part.lane, str(part.key), part.op.value
