"""Saved activations over time: the reference for the curves of pages."""

from __future__ import annotations

from itertools import accumulate
from operator import itemgetter

from pentad.schedules.ir.instruction import instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.memory import SAVED_CHANGE, activation_changes
from pentad.schedules.simulate.timeline import Timeline


def activations_over_time(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """By rank, (time, microbatches saved from then on) at every change, in microbatches of all layers of the rank.

    A forward takes memory when it starts, a backward frees it when it ends. `timeline` is one step of the program on
    the program's ranks.
    """
    spans = {(span.rank, span.name): span for span in timeline.spans}
    change_of_row = iter(activation_changes(program).tolist())
    found = []
    for rank, stream in enumerate(program.streams):
        changes = []
        for part in instructions_of(stream):
            change = next(change_of_row)
            if part.op in SAVED_CHANGE:
                span = spans[rank, str(part.key)]
                changes.append((span.start if change > 0 else span.end, change))
        changes.sort(key=itemgetter(0))  # those at the same time stay in stream order
        times, amounts = [time for time, _ in changes], (change for _, change in changes)
        found.append(list(zip(times, accumulate(amounts), strict=True)))
    return found
