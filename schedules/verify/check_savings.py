"""Proves that parameters are there when they are read, and activations when their backward wants them."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.ir.columns import among
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, Unit
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.passes.zero import READERS
from pentad.schedules.simulate.dependencies import ScheduleError

MOVES = (Op.OFFLOAD, Op.RELOAD, Op.RECOMPUTE)
_MOVES, _GATHERS = among(MOVES), among({Op.ALL_GATHER, Op.FREE})


def prove_savings(program: Program) -> None:
    """Raises ScheduleError unless: where anything is gathered, every stage that a unit reads is, and waited for; a
    gather waits for the FREE before it, a stage is freed while it is there, and in the end if any ever is; an
    activation is offloaded once, behind its F, and is back before its backward, which waits for it; what is recomputed
    is so once, between F and backward."""
    op = program.columns.op
    gathers, moves = bool(_GATHERS[op].any()), bool(_MOVES[op].any())
    for rank, stream in enumerate(program.streams if gathers or moves else ()):
        if gathers:
            _check_gathers(rank, stream, program)
        if moves:
            _check_moves(rank, stream, program.positions[rank])


def _check_gathers(rank: int, stream: Stream, program: Program) -> None:
    here: dict[int, Key] = {}
    unread: set[int] = set()  # gathered, and waited for by nobody yet
    freed: Key | None = None
    for index, unit, part in _parts(stream):
        if part.op is Op.ALL_GATHER:
            if part.stage in here:
                raise ScheduleError(f"rank {rank} gathers {part.key}, but {here[part.stage]} is there", rank, index)
            if freed and not _compute_behind(part.waits, freed, program.positions[rank]):
                raise ScheduleError(f"rank {rank}: {part.key} does not wait for {freed}", rank, index)
            here[part.stage] = part.key
            unread.add(part.stage)
        elif part.op is Op.FREE:
            if here.pop(part.stage, Key(part.op, -1, -1))[1:] != part.key[1:]:
                raise ScheduleError(f"rank {rank} frees {part.key}, which is not there", rank, index)
            freed = part.key
        elif part.op in READERS:
            if part.stage not in here:
                raise ScheduleError(f"rank {rank}: {part.key} reads stage {part.stage}, not gathered", rank, index)
            if part.stage in unread and here[part.stage] not in unit.waits:
                raise ScheduleError(f"rank {rank}: {part.key} does not wait for {here[part.stage]}", rank, index)
            unread.discard(part.stage)
    if freed and here:
        raise ScheduleError(f"rank {rank} never frees {next(iter(here.values()))}", rank, len(stream) - 1)


def _check_moves(rank: int, stream: Stream, position: dict[Key, int]) -> None:
    for index, unit, part in _parts(stream):
        if part.op not in MOVES:
            continue
        made = Key(Op.F, part.stage, part.microbatch)
        backward = next(k for op in (Op.B, Op.BW) if (k := Key(op, part.stage, part.microbatch)) in position)
        if not position[made] < index < position[backward]:
            raise ScheduleError(f"rank {rank}: {part.key} is not between {made} and {backward}", rank, index)
        away, back, again = (Key(op, part.stage, part.microbatch) for op in MOVES)
        if part.op is Op.OFFLOAD and (made not in unit.waits or back not in position):
            raise ScheduleError(f"rank {rank}: {away} does not wait for {made}, or {back} is missing", rank, index)
        if part.op is Op.RELOAD:
            reader = again if again in position else backward
            if position.get(away, index) >= index:
                raise ScheduleError(f"rank {rank}: {back} comes without {away} before it", rank, index)
            if back not in stream[position[reader]].waits:
                raise ScheduleError(f"rank {rank}: {reader} does not wait for {back}", rank, position[reader])


def _compute_behind(waits: tuple[Key, ...], last: Key, position: dict[Key, int]) -> bool:
    """Whether what runs on the compute lane, where FREE does, is waited for up to `last`."""
    lane = COMPUTE | {Op.FREE, Op.RECOMPUTE}
    return any(key.op in lane and position[key] >= position[last] for key in waits)


def _parts(stream: Stream) -> Iterator[tuple[int, Unit, Instruction]]:
    return ((index, unit, part) for index, unit in enumerate(stream) for part in unit.parts)
