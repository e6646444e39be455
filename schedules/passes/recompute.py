"""Pass: RECOMPUTE before every backward of some stages, whose F saves less (Chen et al., arXiv 1604.06174).

It needs nothing from other ranks, so it goes before the wait for the gradient and fills it. W uses what B saves, so a
schedule that splits the backward still recomputes once.
"""

from __future__ import annotations

from collections.abc import Collection

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """RECOMPUTE for every microbatch of these stages. Raises PentadError for a stage that the program does not have."""
    unknown = sorted(stage for stage in stages if not 0 <= stage < program.stages)
    if unknown:
        found = f"memory.recompute_stages has stage {unknown[0]}"
        raise PentadError(f"{found}: expected stages from 0 to {program.stages - 1}")
    additions: list[Addition] = []
    for rank, stream in enumerate(program.streams):
        for position, action in enumerate(stream):
            for part in action.parts:
                if part.op in (Op.B, Op.BW) and part.stage in stages:
                    additions.append((rank, position, Instruction(Op.RECOMPUTE, part.stage, part.microbatch)))
    return insert(program, additions)
