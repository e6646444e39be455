"""What every instruction of a program costs, as an array."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs


def seconds(program: Program, costs: Costs) -> Array:
    """`costs.on` of every row; the buckets of a stage's gradients share its reduction's out."""
    columns = program.columns
    table = np.zeros((len(OPS), program.stages + 1))  # the last is of no stage
    for code in np.flatnonzero(np.bincount(columns.op, ~(IS_SEND | IS_RECEIVE)[columns.op])).tolist():
        table[code] = [costs.of(Instruction(OPS[code], stage)) for stage in (*range(program.stages), -1)]
    table[CODE[Op.ALL_REDUCE], :-1] /= program.buckets
    table[CODE[Op.REDUCE_SCATTER], :-1] /= program.buckets
    found = table[columns.op, columns.stage]
    if costs.slow:
        compute = IS_COMPUTE[columns.op] | (columns.op == CODE[Op.RECOMPUTE])
        found[compute] *= np.array(costs.slow)[columns.rank[compute]]
    for kind, ends in ((IS_SEND, (columns.rank, columns.peer)), (IS_RECEIVE, (columns.peer, columns.rank))):
        moves = columns.rows_of(kind)
        source, target = (end[moves] for end in ends)
        found[moves] = hops(costs, source, target)
    return found


def hops(costs: Costs, source: Array, target: Array) -> Array:
    """`costs.hop` of each."""
    along = np.array(costs.links)[source, target] if costs.links else np.full(len(source), costs.transfer)
    return np.where(source == target, 0.0, along)
