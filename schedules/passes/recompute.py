"""Pass: RECOMPUTE before every backward of some stages (arXiv 1604.06174): F keeps what it received, no more.

It needs nothing of another rank, so it stands before the wait for the gradient and fills it. W reads what B leaves, so
a schedule that splits them recomputes once all the same.
"""

from __future__ import annotations

from collections.abc import Collection

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """RECOMPUTE of every microbatch of these stages. Raises PentadError for a stage that the program does not have."""
    unknown = sorted(stage for stage in stages if not 0 <= stage < program.stages)
    if unknown:
        raise PentadError(f"recompute names stage {unknown[0]}, but the stages are 0 to {program.stages - 1}")
    added: list[Addition] = []
    for rank, stream in enumerate(program.streams):
        for index, unit in enumerate(stream):
            for part in unit.parts:
                if part.op in (Op.B, Op.BW) and part.stage in stages:
                    added.append((rank, index, Instruction(Op.RECOMPUTE, part.stage, part.microbatch)))
    return insert(program, added)
