"""Proves that a program whose steps run ahead of their norm can begin a step once more."""

from __future__ import annotations

from pentad.schedules.instruction import Op, units_of
from pentad.schedules.order import ScheduleError
from pentad.schedules.program import Program
from pentad.schedules.validation import REPEATABLE, ROLLBACK, VALIDATE, is_validated, sent_before_backward


def check_validation(program: Program) -> None:
    """Raises ScheduleError unless VALIDATE and ROLLBACK stand on all ranks or on none, one behind the other, before
    them nothing but forwards and their transfers, and of every transfer both ends or none."""
    validated = is_validated(program)
    early = sent_before_backward(program) if validated else set()
    for rank, stream in enumerate(program.streams):
        position = program.positions[rank]
        for key in (VALIDATE, ROLLBACK):
            if (key in position) != validated:
                has = "has no" if validated else "has"
                raise ScheduleError(f"rank {rank} {has} {key.op}, other than rank 0", rank, position.get(key, -1))
        if not validated:
            continue
        place = position[VALIDATE]
        if position[ROLLBACK] != place + 1 or VALIDATE not in stream[place + 1].waits:
            text = f"rank {rank}: ROLLBACK does not follow VALIDATE and wait for it"
            raise ScheduleError(text, rank, position[ROLLBACK])
        before = list(units_of(stream[:place]))
        for index, part in enumerate(before):
            if part.op not in REPEATABLE | {Op.RECV_F}:
                raise ScheduleError(f"rank {rank}: {part.key} comes before VALIDATE", rank, index)
        received = {(rank, part.key) for part in before if part.op is Op.RECV_F}
        sent = {(peer, key) for peer, key in early if peer == rank}
        for _, key in sorted(received ^ sent):
            ends = ("before", "behind") if (rank, key) in received else ("behind", "before")
            text = f"rank {rank}: {key} comes {ends[0]} VALIDATE, its send {ends[1]} that of its own rank"
            raise ScheduleError(text, rank, position.get(key, -1))
