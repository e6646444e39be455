"""The compute order of a program as the CSV that torch.distributed.pipelining loads: a row a rank, `2F0,2I0,2W0`."""

from __future__ import annotations

from pentad.schedules.instruction import Instruction, Op, Unit
from pentad.schedules.program import Program

_LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}


def torch_csv(program: Program) -> str:
    """The file's text. torch itself refuses programs in which two ranks hold a stage (DualPipe)."""
    return "".join(",".join(map(_cell, stream)) + "\n" for stream in program.compute().streams)


def _cell(unit: Unit) -> str:
    if isinstance(unit, Instruction):
        return f"{unit.stage}{_LETTERS[unit.op]}{unit.microbatch}"
    return f"({_cell(unit.forward)};{_cell(unit.backward)})OVERLAP_F_B"
