"""Pass for the end of an evaluation: the losses are summed over all ranks."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert

LOSS = Key(Op.LOSS, -1, -1)


def add_loss(program: Program) -> Program:
    """LOSS at the end of every stream, after its last forward."""
    columns = program.columns
    ends = np.diff(columns.action_offsets).tolist()
    additions = [
        (rank, end, Instruction(*LOSS, group="pp", waits=(columns.key(row),)))
        for rank, (end, row) in enumerate(zip(ends, program.lookup.last_compute.tolist(), strict=True))
    ]
    return insert(program, additions)
