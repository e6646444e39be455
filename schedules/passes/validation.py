"""Pass: a step that waits for no other rank (post-validation; Zero Bubble, arXiv 2401.10241, section 4).

Every rank takes its STEP as soon as its own gradients are whole, as if the global norm were within the limit: only the
weights that layers read change. The partial sums of the norm travel from the first rank to the last one meanwhile
(NORM). What they came to is heard in the next step, behind the forwards that its warm-up begins with: VALIDATE then
takes the step into the master weights, and ROLLBACK, where the norm was over the limit or not finite, makes the weights
again as they should be and begins the stream once more. So nothing but forwards and their transfers stands before
VALIDATE, and of a transfer both ends do or none.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, among
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert
from pentad.schedules.passes.optimizer_pass import whole_gradients

VALIDATE, ROLLBACK, NORM = (Key(op, -1, -1) for op in (Op.VALIDATE, Op.ROLLBACK, Op.NORM))
REPEATABLE = among({Op.F, Op.SEND_F, Op.ALL_GATHER, Op.FREE, Op.OFFLOAD})  # what may be done once more, by op code
_GRADIENT = among(COMPUTE - {Op.F})


def is_validated(program: Program) -> bool:
    """Whether the program's steps are taken ahead of their norm."""
    return bool((program.columns.op == CODE[Op.VALIDATE]).any())


def add_validated_step(program: Program) -> Program:
    """VALIDATE and ROLLBACK behind the forwards that every stream begins with, NORM and STEP at its end.

    The transfers must have been placed for it (`add_transfers(validated=True)`).
    """
    added: list[Addition] = []
    columns = program.columns
    rows = np.flatnonzero(columns.op == CODE[Op.ALL_GATHER]).tolist()
    gathers = [(columns.key(row), columns.place(row)) for row in rows]
    ends = np.diff(columns.unit_first).tolist()
    for rank, (place, (last, reduced)) in enumerate(zip(_openings(program), whole_gradients(program), strict=True)):
        waits = tuple(key for key, at in gathers if at[0] == rank and at[1] < place)  # what they send must not change
        added.append((rank, place, Instruction(Op.VALIDATE, peer=program.ranks - 1, waits=waits)))
        added.append((rank, place, Instruction(Op.ROLLBACK, waits=(VALIDATE,))))
        added.append((rank, ends[rank], Instruction(Op.NORM, peer=rank - 1, waits=(last, *reduced))))
        added.append((rank, ends[rank], Instruction(Op.STEP, waits=reduced)))
    return insert(program, added)


def _openings(program: Program) -> list[int]:
    """Position in every stream behind what is done once more when the step before was wrong."""
    columns = program.columns
    sends, receives = program.lookup.transfers
    backward = first_rows(program, columns.rows_of(_GRADIENT))
    ready = REPEATABLE[columns.op]
    ready[receives[sends < backward[columns.rank[sends]]]] = True
    stops = first_rows(program, np.flatnonzero(~ready))
    return (columns.unit[stops] - columns.unit_first[:-1]).tolist()


def first_rows(program: Program, rows: Array) -> Array:
    """The first of these ascending rows on every rank, which has one."""
    return rows[np.searchsorted(rows, program.columns.first[:-1])]
