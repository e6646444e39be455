"""What every instruction of a program costs, as an array."""

from __future__ import annotations

import numpy as np

from pentad.schedules.columns import CODE, OPS, Array, among
from pentad.schedules.costs import Costs
from pentad.schedules.instruction import RECEIVES, SENDS, Instruction
from pentad.schedules.lookup import IS_COMPUTE
from pentad.schedules.program import Program

_SENDS, _RECEIVES = among(SENDS), among(RECEIVES)


def seconds(program: Program, costs: Costs) -> Array:
    """`costs.on` of every row."""
    columns = program.columns
    table = np.zeros((len(OPS), program.stages + 1))  # the last is of no stage
    for op in {OPS[code] for code in np.unique(columns.op)} - SENDS.keys() - RECEIVES.keys():
        table[CODE[op]] = [costs.of(Instruction(op, stage)) for stage in (*range(program.stages), -1)]
    found = table[columns.op, columns.stage]
    if costs.slow:
        compute = IS_COMPUTE[columns.op]
        found[compute] *= np.array(costs.slow)[columns.rank[compute]]
    for table, ends in ((_SENDS, (columns.rank, columns.peer)), (_RECEIVES, (columns.peer, columns.rank))):
        moves = table[columns.op]
        source, target = (end[moves] for end in ends)
        found[moves] = hops(costs, source, target)
    return found


def hops(costs: Costs, source: Array, target: Array) -> Array:
    """`costs.hop` of each."""
    along = np.array(costs.links)[source, target] if costs.links else np.full(len(source), costs.transfer)
    return np.where(source == target, 0.0, along)
