"""How many activations each rank saves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array, op_mask
from pentad.schedules.ir.instruction import COMPUTE, Op
from pentad.schedules.ir.program import Program

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
