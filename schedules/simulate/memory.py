"""How much every rank keeps, and when."""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op, units_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline

# Of a chunk's activations: B frees half of them, W the rest. A forward that is done again keeps none of its own.
SHARE = {Op.F: 1.0, Op.B: -0.5, Op.W: -0.5, Op.BW: -1.0, Op.RECOMPUTE: 1.0, Op.OFFLOAD: -1.0, Op.RELOAD: 1.0}
_SHARE = np.array([SHARE.get(op, 0.0) for op in OPS])


def kept(program: Program) -> Array:
    """By row of the program's columns, what it adds to what its rank keeps, in microbatches of a whole rank."""
    columns, changes = program.columns, _SHARE[program.columns.op]
    again = np.flatnonzero(columns.op == CODE[Op.RECOMPUTE])
    if len(again):
        changes[program.lookup.forward[program.lookup.cell(again)]] = 0.0
    return changes / (program.chunks * program.slices)


def activations_over_time(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """(time, microbatches kept from then on) at every change, a list a rank, in microbatches of a whole rank.

    A forward takes its share when it starts, a backward frees its share when it ends. The timeline is one step of the
    program, on the program's ranks. Raises PentadError when an instruction has no span in it, or has several.
    """
    spans = {(span.rank, span.name): span for span in timeline.spans}
    if len(spans) < len(timeline.spans):
        raise PentadError(f"the timeline has steps {list(timeline.steps)}, but one step at a time is expected")
    shares = iter(kept(program).tolist())
    found = []
    for rank, stream in enumerate(program.streams):
        changes = []
        for part in units_of(stream):
            share = next(shares)
            if part.op in SHARE:
                span = spans.get((rank, str(part.key)))
                if span is None:
                    raise PentadError(
                        f"the timeline has no {part.key} of rank {rank}, which program {program.name} has"
                    )
                changes.append((span.start if share > 0 else span.end, share))
        found.append(_summed(changes))
    return found


def _summed(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is kept after each change; those of one moment stay in the order of the stream."""
    kept, found = 0.0, []
    for time, change in sorted(changes, key=itemgetter(0)):
        kept += change
        found.append((time, kept))
    return found
