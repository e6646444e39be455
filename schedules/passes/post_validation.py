"""Pass: an optimizer step that waits for no other rank (post-validation; Zero Bubble, arXiv 2401.10241, section 4).

Every rank takes its STEP as soon as its own gradients are complete, as if the global norm were within the limit. Only
the weights that layers read change. Meanwhile the partial sums of the norm travel from the first rank to the last
(NORM). The result arrives in the next step, after the forwards of its warm-up. If the norm was fine, VALIDATE commits
the step to the master weights. If it was over the limit or not finite, ROLLBACK restores the weights and restarts the
stream. So only forwards and their transfers come before VALIDATE, and each transfer has both ends before it or neither.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, op_mask
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert
from pentad.schedules.passes.optimizer_pass import complete_gradients, wait_for
from pentad.schedules.passes.transfers import first_rows

VALIDATE, ROLLBACK, NORM = (Key(op, -1, -1) for op in (Op.VALIDATE, Op.ROLLBACK, Op.NORM))
REPEATABLE = op_mask({Op.F, Op.SEND_F, Op.ALL_GATHER, Op.FREE, Op.OFFLOAD})  # may run again after ROLLBACK
_IS_BACKWARD = op_mask(COMPUTE - {Op.F})


def has_post_validation(program: Program) -> bool:
    """Whether steps are taken before their norm is known."""
    return bool((program.columns.op == CODE[Op.VALIDATE]).any())


def add_post_validation(program: Program) -> Program:
    """VALIDATE and ROLLBACK after the forwards at the start of every stream, NORM and STEP at its end.

    The transfers must have been placed for it (`add_transfers(post_validation=True)`).
    """
    additions: list[Addition] = []
    columns = program.columns
    is_gather = columns.op == CODE[Op.ALL_GATHER]
    gathers = [(columns.key(row), *columns.position(row)) for row in np.flatnonzero(is_gather).tolist()]
    positions = _first_unrepeatable(program)
    for rank, end in enumerate(np.diff(columns.action_offsets).tolist()):
        position = positions[rank]
        # VALIDATE and ROLLBACK change the weights that earlier gathers still send.
        waits = tuple(key for key, where, at in gathers if where == rank and at < position)
        additions.append((rank, position, Instruction(Op.VALIDATE, peer=program.ranks - 1, waits=waits)))
        additions.append((rank, position, Instruction(Op.ROLLBACK, waits=(VALIDATE,))))
        additions.append((rank, end, Instruction(Op.NORM, peer=rank - 1)))
        additions.append((rank, end, Instruction(Op.STEP)))
    found, (last, reductions) = insert(program, additions), complete_gradients(program)
    found = wait_for(found, Op.NORM, program, np.concatenate((last, reductions)))
    return wait_for(found, Op.STEP, program, reductions)


def _first_unrepeatable(program: Program) -> list[int]:
    """By rank: position in its stream of the first instruction that must not run twice."""
    columns = program.columns
    sends, receives = program.lookup.transfers
    backward = first_rows(columns, columns.rows_of(_IS_BACKWARD))
    repeatable = REPEATABLE[columns.op]
    repeatable[receives[sends < backward[columns.rank[sends]]]] = True  # the sender sends again too
    first = first_rows(columns, np.flatnonzero(~repeatable))
    return (columns.action[first] - columns.action_offsets[:-1]).tolist()
