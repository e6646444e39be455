"""How many activations each rank saves, and when."""

from __future__ import annotations

from itertools import accumulate, pairwise
from operator import itemgetter

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline

# Change in saved activations, in chunks of one microbatch: B frees half of them, W the rest; OFFLOAD frees them for the
# compute instruction that waits for it.
SAVED_CHANGE = {Op.F: 1.0, Op.B: -0.5, Op.W: -0.5, Op.BW: -1.0, Op.RECOMPUTE: 1.0, Op.OFFLOAD: -1.0, Op.RELOAD: 1.0}
_SAVED_CHANGE = np.array([SAVED_CHANGE.get(op, 0.0) for op in OPS])
_ON_COMPUTE_LANE = op_mask(COMPUTE | {Op.RECOMPUTE})


def activation_changes(program: Program) -> Array:
    """By row, the change in its rank's saved activations, in microbatches of all its layers. A forward that will be
    recomputed, or has no backward, saves nothing."""
    columns, changes = program.columns, _SAVED_CHANGE[program.columns.op]
    recomputed = np.flatnonzero(columns.op == CODE[Op.RECOMPUTE])
    for op in (Op.F, Op.OFFLOAD, Op.RELOAD) if len(recomputed) else ():
        keys = columns.rank[recomputed], CODE[op], columns.stage[recomputed], columns.microbatch[recomputed]
        found = program.lookup.rows(*keys)
        changes[found[found >= 0]] = 0.0
    offloads, takers = take_overs(program)
    np.add.at(changes, takers, changes[offloads])
    changes[offloads] = 0.0
    if program.forward_only:
        return np.zeros_like(changes)
    return changes / (program.chunks * program.slices)


def take_overs(program: Program) -> tuple[Array, Array]:
    """(rows of OFFLOAD, for each the first row of the compute lane that waits for it and so takes over the memory)."""
    columns, targets = program.columns, program.lookup.wait_targets
    is_taken = (
        (targets >= 0) & (columns.op[targets] == CODE[Op.OFFLOAD]) & _ON_COMPUTE_LANE[columns.op[columns.wait_row]]
    )
    offloads, first = np.unique(targets[is_taken], return_index=True)
    return offloads, columns.wait_row[is_taken][first]


def peak_activations(program: Program) -> list[float]:
    """Most activations each rank saves at once, in microbatches of all its layers."""
    changes = activation_changes(program)
    return [
        float(np.max(np.cumsum(changes[a:b]), initial=0.0)) for a, b in pairwise(program.columns.rank_offsets.tolist())
    ]


def activations_over_time(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """By rank, (time, microbatches saved from then on) at every change, in microbatches of all layers of the rank.

    A forward takes memory when it starts, a backward frees it when it ends. `timeline` is one step of the program on
    the program's ranks. Raises PentadError if an instruction has no span in it, or several.
    """
    spans = {(span.rank, span.name): span for span in timeline.spans}
    if len(spans) < len(timeline.spans):
        raise PentadError(f"the timeline has steps {list(timeline.steps)}: expected one step")
    change_of_row = iter(activation_changes(program).tolist())
    found = []
    for rank, stream in enumerate(program.streams):
        changes = []
        for part in instructions_of(stream):
            change = next(change_of_row)
            if part.op in SAVED_CHANGE:
                span = spans.get((rank, str(part.key)))
                if span is None:
                    text = f"the timeline has no {part.key} of rank {rank}"
                    raise PentadError(f"{text}: expected every instruction of program {program.name}")
                changes.append((span.start if change > 0 else span.end, change))
        changes.sort(key=itemgetter(0))  # those at the same time stay in stream order
        times, amounts = [time for time, _ in changes], (change for _, change in changes)
        found.append(list(zip(times, accumulate(amounts), strict=True)))
    return found
