"""Pass: a step that waits for no other rank (post-validation; Zero Bubble, arXiv 2401.10241, section 4).

Every rank takes its STEP as soon as its own gradients are whole, as if the global norm were within the limit: only the
weights that layers read change. The partial sums of the norm travel from the first rank to the last one meanwhile
(NORM). What they came to is heard in the next step, behind the forwards that its warm-up begins with: VALIDATE then
takes the step into the master weights, and ROLLBACK, where the norm was over the limit or not finite, makes the weights
again as they should be and begins the stream once more. So nothing but forwards and their transfers stands before
VALIDATE, and of a transfer both ends do or none.
"""

from __future__ import annotations

from pentad.schedules.instruction import COMPUTE, Instruction, Key, Op, units_of
from pentad.schedules.program import Program, Stream
from pentad.schedules.weave import Addition, insert

VALIDATE, ROLLBACK, NORM = (Key(op, -1, -1) for op in (Op.VALIDATE, Op.ROLLBACK, Op.NORM))

REPEATABLE = frozenset({Op.F, Op.SEND_F, Op.ALL_GATHER, Op.FREE, Op.OFFLOAD})


def add_validated_step(program: Program) -> Program:
    """VALIDATE and ROLLBACK behind the forwards that every stream begins with, NORM and STEP at its end.

    The transfers must have been placed for it (`add_transfers(validated=True)`).
    """
    early = sent_before_backward(program)
    added: list[Addition] = []
    for rank, stream in enumerate(program.streams):
        place = _opening(stream, rank, early)
        # What a gather sends must not change on its way.
        gathers = tuple(part.key for part in units_of(stream[:place]) if part.op is Op.ALL_GATHER)
        added.append((rank, place, Instruction(Op.VALIDATE, peer=program.ranks - 1, waits=gathers)))
        added.append((rank, place, Instruction(Op.ROLLBACK, waits=(VALIDATE,))))
        added += [(rank, len(stream), part) for part in _ending(stream, rank)]
    return insert(program, added)


def is_validated(program: Program) -> bool:
    """Whether the program's steps are taken ahead of their norm."""
    return VALIDATE in program.positions[0]


def sent_before_backward(program: Program) -> set[tuple[int, Key]]:
    """(receiving rank, key of the receive) of every transfer whose send stands before its rank's first backward."""
    found = set()
    for stream in program.streams:
        for part in units_of(stream):
            if part.op is Op.VALIDATE or (part.op in COMPUTE and part.op is not Op.F):
                break
            if part.op is Op.SEND_F:
                found.add((part.peer, Key(Op.RECV_F, part.stage + 1, part.microbatch)))
    return found


def _opening(stream: Stream, rank: int, early: set[tuple[int, Key]]) -> int:
    for index, unit in enumerate(stream):
        ops = {part.op for part in unit.parts}
        if not ops <= REPEATABLE and (rank, unit.key) not in early:
            return index
    return len(stream)


def _ending(stream: Stream, rank: int) -> tuple[Instruction, Instruction]:
    parts = list(units_of(stream))
    last = next(part.key for part in reversed(parts) if part.op in COMPUTE)
    reduced = tuple(part.key for part in parts if part.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER))
    norm = Instruction(Op.NORM, peer=rank - 1, waits=(last, *reduced))
    return norm, Instruction(Op.STEP, waits=reduced)
