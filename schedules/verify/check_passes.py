"""The part of the proof for what optional passes add: ZeRO's gathers, recomputation, offloading, post-validation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pentad.schedules.ir.columns import CODE, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COMPUTE, Action, Instruction, Key, Op
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.passes.post_validation import REPEATABLE, ROLLBACK, VALIDATE, has_post_validation
from pentad.schedules.passes.zero import READERS
from pentad.schedules.passes.zero_buffers import gradient_pool, meet
from pentad.schedules.verify.check_order import error_at, refuse

SAVED_ACTIVATION_OPS = (Op.OFFLOAD, Op.RELOAD, Op.RECOMPUTE)
ALLOCATING = COMPUTE | {Op.RECOMPUTE}
COMPUTE_LANE = ALLOCATING | {Op.FREE}
Fault = tuple[int, str]  # index in a rank's stream, and what is wrong there
_ON_ACTIVATIONS, _ON_PARAMETERS = op_mask(SAVED_ACTIVATION_OPS), op_mask({Op.ALL_GATHER, Op.FREE})


def prove_memory_passes(program: Program) -> None:
    """Proves gathers, recomputation and offloading.

    If a rank gathers parameters, each action waits for those of every stage that it reads. A gather waits for the FREE
    before it, only gathered parameters are freed, and if any are, all are. An activation is offloaded after its forward
    and reloaded before its backward or recomputation, which waits for it. In between, compute waits for the offload
    before it takes over the memory; both wait for the compute before them, whose memory they may get. What is
    recomputed is so between its forward and its backward. Raises ScheduleError.
    """
    for faults, ops in ((_gather_faults, _ON_PARAMETERS), (_activation_faults, _ON_ACTIVATIONS)):
        if ops[program.columns.op].any():
            for rank, stream in enumerate(program.streams):
                for index, fault in faults(stream, program.positions[rank]):
                    raise ScheduleError(f"rank {rank}: {fault}", rank, index)


def _gather_faults(stream: Stream, position: dict[Key, int]) -> Iterator[Fault]:
    gathered: dict[int, Key] = {}  # stage -> its gather, until it is freed
    unread: set[int] = set()  # stages gathered that no action has waited for yet
    freed: Key | None = None
    for index, action, part in _parts(stream):
        if part.op is Op.ALL_GATHER:
            if part.stage in gathered:
                yield index, f"{part.key} gathers what {gathered[part.stage]} has gathered"
            if freed and not _waits_up_to(part.waits, freed, position):
                yield index, f"{part.key} does not wait for {freed}"
            gathered[part.stage] = part.key
            unread.add(part.stage)
        elif part.op is Op.FREE:
            if gathered.pop(part.stage, Key(part.op, -1, -1))[1:] != part.key[1:]:
                yield index, f"{part.key} frees what is not gathered"
            freed = part.key
        elif part.op in READERS:
            if part.stage not in gathered:
                yield index, f"{part.key} reads stage {part.stage}, not gathered"
            if part.stage in unread and gathered[part.stage] not in action.waits:
                yield index, f"{part.key} does not wait for {gathered[part.stage]}"
            unread.discard(part.stage)
    if freed and gathered:
        yield len(stream) - 1, f"{next(iter(gathered.values()))} is never freed"


def prove_gradient_buffers(program: Program) -> None:
    """Proves, where gradients are reduced for every microbatch, that a stage takes its place in the pool of gradients
    only after the REDUCE_SCATTER of all that were there, and begins a microbatch only after that of its last one.
    Raises ScheduleError."""
    for rank, stream in enumerate(program.streams):
        pool, accumulating = gradient_pool(program, rank), set[int]()
        reduced = dict[int, Key]()  # by stage, in order
        for index, _, part in _parts(stream):
            stage = part.stage
            if part.op is Op.REDUCE_SCATTER:
                accumulating.discard(stage)
                reduced.pop(stage, None)
                reduced[stage] = part.key
            elif part.op in (Op.W, Op.BW) and (stage, 0) in pool.offsets and stage not in accumulating:
                for other in accumulating:
                    if meet(program, pool, stage, other):
                        raise ScheduleError(f"rank {rank}: {part.key} takes the buffer of stage {other}", rank, index)
                before = [key for other, key in reduced.items() if meet(program, pool, stage, other)]
                for key in (*before[-1:], reduced.get(stage)):
                    if key is not None and key not in part.waits:
                        raise ScheduleError(f"rank {rank}: {part.key} does not wait for {key}", rank, index)
                accumulating.add(stage)


def _waits_up_to(waits: tuple[Key, ...], last: Key, position: dict[Key, int]) -> bool:
    """Whether `waits` has `last`, which is on the compute lane, or something later on that lane."""
    return any(key.op in COMPUTE_LANE and position[key] >= position[last] for key in waits)


def _activation_faults(stream: Stream, position: dict[Key, int]) -> Iterator[Fault]:
    taken: set[Key] = set()  # offloads that compute has waited for
    newest: Key | None = None  # on the compute lane
    for index, action, part in _parts(stream):
        if part.op in ALLOCATING:
            newest = part.key
            for key in part.waits:
                reader = Key(Op.F, key.stage + 1, key.microbatch)  # its input may be part of what is offloaded
                if key.op is Op.OFFLOAD and position.get(reader, -1) >= index:
                    yield index, f"{part.key} takes over the memory of {key} before {reader} has read it"
                if key.op is Op.OFFLOAD:
                    taken.add(key)
        if part.op not in SAVED_ACTIVATION_OPS:
            continue
        ops = (Op.F, Op.B, Op.BW, *SAVED_ACTIVATION_OPS)
        forward, b, bw, offload, reload, recompute = (Key(op, part.stage, part.microbatch) for op in ops)
        backward = b if b in position else bw
        if not position.get(forward, index) < index < position.get(backward, index):
            yield index, f"{part.key} is not between {forward} and {backward}"
        if part.op is Op.OFFLOAD and (forward not in action.waits or reload not in position):
            yield index, f"{offload} does not wait for {forward}, or {reload} is missing"
        if part.op is not Op.RECOMPUTE and newest and not _waits_up_to(part.waits, newest, position):
            yield index, f"{part.key} does not wait for {newest}, whose memory it may get"
        if part.op is Op.RELOAD:
            reader = recompute if recompute in position else backward
            if offload not in part.waits:
                yield index, f"{reload} does not wait for {offload}"
            if offload not in taken:
                yield index, f"no compute instruction before {reload} waits for {offload}, so its memory is never free"
            if reload not in stream[position[reader]].waits:
                yield position[reader], f"{reader} does not wait for {reload}"


def _parts(stream: Stream) -> Iterator[tuple[int, Action, Instruction]]:
    return ((index, action, part) for index, action in enumerate(stream) for part in action.parts)


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
    wrong = before & ~(REPEATABLE[columns.op] | (columns.op == CODE[Op.RECV_F]))
    refuse(program, np.arange(columns.rows), wrong, lambda row: f"{columns.key(row)} comes before VALIDATE")
    sends, receives = program.lookup.transfers
    split = np.flatnonzero(before[sends] != before[receives])
    if len(split):
        row = receives[split[0]]
        here, there = ("before", "after") if before[row] else ("after", "before")
        text = f"{columns.key(row)} is {here} VALIDATE, but its send is {there} that of its rank"
        raise error_at(program, row, text)
