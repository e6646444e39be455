"""How much every rank keeps, and when."""

from __future__ import annotations

from operator import itemgetter

from pentad.schedules.errors import PentadError
from pentad.schedules.instruction import COMPUTE, Op, units_of
from pentad.schedules.program import Program
from pentad.schedules.timeline import Timeline

SHARE = {Op.F: 1.0, Op.B: -0.5, Op.W: -0.5, Op.BW: -1.0}  # of a chunk's activations: B frees half of them, W the rest


def activations_over_time(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """(time, microbatches kept from then on) at every change, a list a rank, in microbatches of a whole rank.

    A forward takes its share when it starts, a backward frees its share when it ends. The timeline is one step of the
    program, on the program's ranks. Raises PentadError when an instruction has no span in it, or has several.
    """
    spans = {(span.rank, span.name): span for span in timeline.compute}
    if len(spans) < len(timeline.compute):
        raise PentadError(f"the timeline has steps {list(timeline.steps)}, but one step at a time is wanted")
    found = []
    for rank, stream in enumerate(program.streams):
        changes = []
        for part in units_of(stream):
            if part.op in COMPUTE:
                span = spans.get((rank, str(part.key)))
                if span is None:
                    raise PentadError(
                        f"the timeline has no {part.key} of rank {rank}, which program {program.name} has"
                    )
                changes.append(
                    (span.start if part.op is Op.F else span.end, SHARE[part.op] / (program.chunks * program.slices))
                )
        found.append(_summed(changes))
    return found


def _summed(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is kept after each change; those of one moment stay in the order of the stream."""
    kept, found = 0.0, []
    for time, change in sorted(changes, key=itemgetter(0)):
        kept += change
        found.append((time, kept))
    return found
