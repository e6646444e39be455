"""How much every rank keeps, and when."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from pentad.schedules.errors import PentadError
from pentad.schedules.instruction import Instruction, Op, units_of
from pentad.schedules.program import Program, Stream
from pentad.schedules.timeline import Timeline

SHARE = {Op.F: 1.0, Op.B: -0.5, Op.W: -0.5, Op.BW: -1.0}  # of a chunk's activations: B frees half of them, W the rest
AGAIN = {Op.OFFLOAD: -1.0, Op.RELOAD: 1.0, Op.RECOMPUTE: 1.0}  # what it comes to where less is kept
ENDING = frozenset({Op.B, Op.W, Op.BW, Op.OFFLOAD})  # free their share when they end


def changes_of(stream: Stream) -> Iterator[tuple[Instruction, float]]:
    """Each instruction that changes how much is kept, in activations of a chunk. A stage that recomputes keeps nothing
    from F to RECOMPUTE."""
    light = {part.stage for part in units_of(stream) if part.op is Op.RECOMPUTE}
    for part in units_of(stream):
        if part.op in AGAIN:
            yield part, AGAIN[part.op]
        elif part.op in SHARE and not (part.op is Op.F and part.stage in light):
            yield part, SHARE[part.op]


def activations_over_time(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """(time, microbatches kept from then on) at every change, a list a rank, in microbatches of a whole rank.

    What takes its share does so when it starts, what frees its share when it ends. The timeline is one step of the
    program, on the program's ranks. Raises PentadError when an instruction has no span in it, or has several.
    """
    named = [span for span in timeline.spans if span.op in SHARE or span.op in AGAIN]
    spans = {(span.rank, span.name): span for span in named}
    if len(spans) < len(named):
        raise PentadError(f"the timeline has steps {list(timeline.steps)}, but one step at a time is wanted")
    found = []
    for rank, stream in enumerate(program.streams):
        changes = []
        for part, share in changes_of(stream):
            span = spans.get((rank, str(part.key)))
            if span is None:
                raise PentadError(f"the timeline has no {part.key} of rank {rank}, which program {program.name} has")
            time = span.end if part.op in ENDING else span.start
            changes.append((time, share / (program.chunks * program.slices)))
        found.append(_summed(changes))
    return found


def _summed(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is kept after each change; those of one moment stay in the order of the stream."""
    kept, found = 0.0, []
    for time, change in sorted(changes, key=itemgetter(0)):
        kept += change
        found.append((time, kept))
    return found
