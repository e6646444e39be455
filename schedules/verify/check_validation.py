"""Proves that a program whose steps run ahead of their norm can begin a step once more."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.validation import REPEATABLE, ROLLBACK, VALIDATE, is_validated
from pentad.schedules.simulate.dependencies import ScheduleError


def prove_validation(program: Program) -> None:
    """Raises ScheduleError unless VALIDATE and ROLLBACK stand on all ranks or on none, one behind the other, before
    them nothing but forwards and their transfers, and of every transfer both ends or none. The transfers match."""
    columns, ranks = program.columns, np.arange(program.ranks)
    if not (is_validated(program) or (columns.op == CODE[Op.ROLLBACK]).any()):
        return
    place, back = (program.lookup.rows(ranks, CODE[key.op], -1, ranks * 0 - 1) for key in (VALIDATE, ROLLBACK))
    for rank in range(program.ranks):
        if place[rank] < 0 or back[rank] < 0:
            missing = VALIDATE if place[rank] < 0 else ROLLBACK
            raise ScheduleError(f"rank {rank} has no {missing.op}", rank, -1)
        if back[rank] != place[rank] + 1 or VALIDATE not in columns.waits(back[rank]):
            raise _at(program, back[rank], "ROLLBACK does not follow VALIDATE and wait for it")
    before = np.arange(columns.rows) < place[columns.rank]
    wrong = np.flatnonzero(before & ~(REPEATABLE[columns.op] | (columns.op == CODE[Op.RECV_F])))
    if len(wrong):
        raise _at(program, wrong[0], f"{columns.key(wrong[0])} comes before VALIDATE")
    _prove_both_or_none(program, before)


def _prove_both_or_none(program: Program, before: Array) -> None:
    columns = program.columns
    sends, receives = program.lookup.transfers
    apart = np.flatnonzero(before[sends] != before[receives])
    if len(apart):
        row = receives[apart[0]]
        ends = ("before", "behind") if before[row] else ("behind", "before")
        text = f"{columns.key(row)} comes {ends[0]} VALIDATE, its send {ends[1]} that of its own rank"
        raise _at(program, row, text)


def _at(program: Program, row: int, text: str) -> ScheduleError:
    rank, at = program.columns.place(row)
    return ScheduleError(f"rank {rank}: {text}", rank, at)
