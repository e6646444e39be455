"""The part of the proof for what optional passes add: ZeRO's gathers, recomputation, offloading, post-validation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pentad.schedules.ir.columns import CODE, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, Unit
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.passes.post_validation import REPEATABLE, ROLLBACK, VALIDATE, has_post_validation
from pentad.schedules.passes.zero import READERS
from pentad.schedules.verify.check_order import error_at

SAVED_ACTIVATION_OPS = (Op.OFFLOAD, Op.RELOAD, Op.RECOMPUTE)
COMPUTE_LANE = COMPUTE | {Op.FREE, Op.RECOMPUTE}
_ON_ACTIVATIONS, _ON_PARAMETERS = op_mask(SAVED_ACTIVATION_OPS), op_mask({Op.ALL_GATHER, Op.FREE})


def prove_memory_passes(program: Program) -> None:
    """Proves gathers, recomputation and offloading.

    If a rank gathers parameters, each unit waits for those of every stage that it reads. A gather waits for the FREE
    before it, only gathered parameters are freed, and if any are, all are. An activation is offloaded after its forward
    and reloaded before its backward or recomputation, which waits for it. What is recomputed is so between its forward
    and its backward. Raises ScheduleError.
    """
    op = program.columns.op
    if _ON_PARAMETERS[op].any():
        for rank, stream in enumerate(program.streams):
            _prove_gathers(rank, stream, program.positions[rank])
    if _ON_ACTIVATIONS[op].any():
        for rank, stream in enumerate(program.streams):
            _prove_activations(rank, stream, program.positions[rank])


def _prove_gathers(rank: int, stream: Stream, position: dict[Key, int]) -> None:
    gathered: dict[int, Key] = {}  # stage -> its gather, until it is freed
    unread: set[int] = set()  # stages gathered that no unit has waited for yet
    freed: Key | None = None
    for index, unit, part in _parts(stream):
        if part.op is Op.ALL_GATHER:
            if part.stage in gathered:
                text = f"rank {rank}: {part.key} gathers what {gathered[part.stage]} has gathered"
                raise ScheduleError(text, rank, index)
            if freed and not _waits_up_to(part.waits, freed, position):
                raise ScheduleError(f"rank {rank}: {part.key} does not wait for {freed}", rank, index)
            gathered[part.stage] = part.key
            unread.add(part.stage)
        elif part.op is Op.FREE:
            if gathered.pop(part.stage, Key(part.op, -1, -1))[1:] != part.key[1:]:
                raise ScheduleError(f"rank {rank}: {part.key} frees what is not gathered", rank, index)
            freed = part.key
        elif part.op in READERS:
            if part.stage not in gathered:
                raise ScheduleError(f"rank {rank}: {part.key} reads stage {part.stage}, not gathered", rank, index)
            if part.stage in unread and gathered[part.stage] not in unit.waits:
                raise ScheduleError(f"rank {rank}: {part.key} does not wait for {gathered[part.stage]}", rank, index)
            unread.discard(part.stage)
    if freed and gathered:
        raise ScheduleError(f"rank {rank} never frees {next(iter(gathered.values()))}", rank, len(stream) - 1)


def _waits_up_to(waits: tuple[Key, ...], last: Key, position: dict[Key, int]) -> bool:
    """Whether `waits` has `last`, which is on the compute lane, or something later on that lane."""
    return any(key.op in COMPUTE_LANE and position[key] >= position[last] for key in waits)


def _prove_activations(rank: int, stream: Stream, position: dict[Key, int]) -> None:
    for index, unit, part in _parts(stream):
        if part.op not in SAVED_ACTIVATION_OPS:
            continue
        forward = Key(Op.F, part.stage, part.microbatch)
        backward = next(k for op in (Op.B, Op.BW) if (k := Key(op, part.stage, part.microbatch)) in position)
        if not position[forward] < index < position[backward]:
            raise ScheduleError(f"rank {rank}: {part.key} is not between {forward} and {backward}", rank, index)
        offload, reload, recompute = (Key(op, part.stage, part.microbatch) for op in SAVED_ACTIVATION_OPS)
        if part.op is Op.OFFLOAD and (forward not in unit.waits or reload not in position):
            text = f"{offload} does not wait for {forward}, or {reload} is missing"
            raise ScheduleError(f"rank {rank}: {text}", rank, index)
        if part.op is Op.RELOAD:
            reader = recompute if recompute in position else backward
            if position.get(offload, index) >= index:
                raise ScheduleError(f"rank {rank}: {reload} comes without {offload} before it", rank, index)
            if reload not in stream[position[reader]].waits:
                raise ScheduleError(f"rank {rank}: {reader} does not wait for {reload}", rank, position[reader])


def _parts(stream: Stream) -> Iterator[tuple[int, Unit, Instruction]]:
    return ((index, unit, part) for index, unit in enumerate(stream) for part in unit.parts)


def prove_post_validation(program: Program) -> None:
    """Proves that a rank can roll back and begin a step again.

    All ranks have VALIDATE and then ROLLBACK, or none has. Only what can be repeated comes before VALIDATE: forwards
    and their transfers. A transfer is before VALIDATE on both of its ranks or after it on both. Raises ScheduleError.
    """
    columns, ranks = program.columns, np.arange(program.ranks)
    if not (has_post_validation(program) or (columns.op == CODE[Op.ROLLBACK]).any()):
        return
    validate, rollback = (program.lookup.rows(ranks, CODE[key.op], -1, ranks * 0 - 1) for key in (VALIDATE, ROLLBACK))
    for rank in range(program.ranks):
        if validate[rank] < 0 or rollback[rank] < 0:
            missing = VALIDATE if validate[rank] < 0 else ROLLBACK
            raise ScheduleError(f"rank {rank} has no {missing.op}", rank, -1)
        if rollback[rank] != validate[rank] + 1 or VALIDATE not in columns.waits(rollback[rank]):
            raise error_at(program, rollback[rank], "ROLLBACK does not follow VALIDATE and wait for it")
    before = np.arange(columns.rows) < validate[columns.rank]
    wrong = np.flatnonzero(before & ~(REPEATABLE[columns.op] | (columns.op == CODE[Op.RECV_F])))
    if len(wrong):
        raise error_at(program, wrong[0], f"{columns.key(wrong[0])} comes before VALIDATE")
    sends, receives = program.lookup.transfers
    split = np.flatnonzero(before[sends] != before[receives])
    if len(split):
        row = receives[split[0]]
        here, there = ("before", "after") if before[row] else ("after", "before")
        text = f"{columns.key(row)} is {here} VALIDATE, but its send is {there} that of its rank"
        raise error_at(program, row, text)
