"""The part of the proof for what optional passes add: ZeRO's gathers, recomputation, offloading, post-validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COMPUTE, Key, Op
from pentad.schedules.ir.lookup import IS_REDUCTION, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import complete_weight_grads
from pentad.schedules.passes.post_validation import REPEATABLE, ROLLBACK, VALIDATE, has_post_validation
from pentad.schedules.passes.zero import is_reader
from pentad.schedules.passes.zero_buffers import bits_of, gradient_sums, gradient_waits, stages_sharing_memory
from pentad.schedules.simulate.events import ON_COMPUTE_LANE
from pentad.schedules.verify.check_order import error_at, refuse

SAVED_ACTIVATION_OPS = (Op.OFFLOAD, Op.RELOAD, Op.RECOMPUTE)
_ALLOCATES = op_mask(COMPUTE | {Op.RECOMPUTE})
_ON_ACTIVATIONS, _ON_PARAMETERS = op_mask(SAVED_ACTIVATION_OPS), op_mask({Op.ALL_GATHER, Op.FREE})
_IS_GATHER, _IS_FREE = op_mask({Op.ALL_GATHER}), op_mask({Op.FREE})
_GATHER, _FREE = CODE[Op.ALL_GATHER], CODE[Op.FREE]


def prove_memory_passes(program: Program) -> None:
    """Proves gathers, recomputation and offloading.

    If a rank gathers parameters, each action waits for those of every stage that it reads. A gather waits for the FREE
    before it, only gathered parameters are freed, and if any are, all are. An activation is offloaded after its forward
    and reloaded before its backward or recomputation, which waits for it. In between, compute waits for the offload
    before it takes over the memory; OFFLOAD and RELOAD wait for the compute before them, whose memory they may get.
    RECOMPUTE is between the forward and the backward. Raises ScheduleError.
    """
    columns = program.columns
    if _ON_PARAMETERS[columns.op].any():
        _prove_gathers(program)
    if _ON_ACTIVATIONS[columns.op].any():
        _prove_activations(program)


def _prove_activations(program: Program) -> None:
    """Raises ScheduleError for the first fault of the first rank that has one."""
    for _, at, fault in sorted(_activation_faults(program), key=lambda each: each[0])[:1]:
        rank, index = program.columns.position(at)
        raise ScheduleError(f"rank {rank}: {fault}", rank, index)


def _prove_gathers(program: Program) -> None:
    """Raises ScheduleError for the first fault of the first rank that has one."""
    columns = program.columns
    events = _gather_events(program)
    faults = [*_gather_faults(program, events), *_late_gather_faults(program)]
    readers, gathers = events.row[events.is_first_read], events.before[events.is_first_read]
    for k in unmet_waits(columns.action, program, readers, gathers).tolist():
        faults.append((int(readers[k]), f"{columns.key(readers[k])} does not wait for {columns.key(gathers[k])}"))
    for row, fault in sorted(faults)[:1]:
        rank, index = columns.position(row)
        raise ScheduleError(f"rank {rank}: {fault}", rank, index)


class _GatherEvents(NamedTuple):
    """Gathers, frees and readers, sorted by rank, stage and row. `before` is the row of the last gather or free of that
    stage on that rank, -1 if there is none, and `is_first_read` whether this is the first reader of what `before`
    gathers."""

    row: Array
    before: Array
    is_gathered: Array
    is_first_read: Array


def _gather_events(program: Program) -> _GatherEvents:
    columns = program.columns
    row = np.flatnonzero(_ON_PARAMETERS[columns.op] | is_reader(program))
    holding = columns.rank[row] * program.stages + columns.stage[row]
    order = np.argsort(holding, kind="stable")
    row, holding = row[order], holding[order]
    on_parameters, at = _ON_PARAMETERS[columns.op[row]], np.arange(len(row))
    is_new = np.append(True, holding[1:] != holding[:-1])[: len(row)]
    latest = np.maximum.accumulate(np.where(on_parameters, at, -1))  # up to this one
    before = np.append(-1, latest)[: len(row)]
    known = before >= np.maximum.accumulate(np.where(is_new, at, 0))
    before = np.where(known, row[before], -1)
    is_gathered = known & (columns.op[before] == _GATHER)
    follows = np.append(-1, row)[: len(row)] == before
    return _GatherEvents(row, before, is_gathered, ~on_parameters & is_gathered & follows)


def _gather_faults(program: Program, events: _GatherEvents) -> Iterator[tuple[int, str]]:
    """(row, what is wrong there) of gathers, frees and readers."""
    columns, (row, before, is_gathered, _) = program.columns, events
    op, number = columns.op[row], columns.microbatch
    for k in np.flatnonzero(is_gathered & (op == _GATHER)).tolist():
        yield int(row[k]), f"{columns.key(row[k])} gathers what {columns.key(before[k])} has gathered"
    for k in np.flatnonzero((op == _FREE) & ~(is_gathered & (number[before] == number[row]))).tolist():
        yield int(row[k]), f"{columns.key(row[k])} frees what is not gathered"
    for k in np.flatnonzero(is_reader(program)[row] & ~is_gathered).tolist():
        yield int(row[k]), f"{columns.key(row[k])} reads stage {columns.stage[row[k]]}, not gathered"


def _late_gather_faults(program: Program) -> Iterator[tuple[int, str]]:
    """The same for gathers that do not wait for the FREE before them on their rank, and for those that are never freed
    on a rank that frees others."""
    columns, latest = program.columns, _latest_compute_waits(program)
    gathers, frees = columns.rows_of(_IS_GATHER), columns.rows_of(_IS_FREE)
    freed = np.append(frees, -1)[np.searchsorted(frees, gathers) - 1]
    freed = np.where(freed >= columns.rank_offsets[columns.rank[gathers]], freed, -1)
    for k in np.flatnonzero((freed >= 0) & (latest[gathers] < columns.action[freed])).tolist():
        yield int(gathers[k]), f"{columns.key(gathers[k])} does not wait for {columns.key(freed[k])}"
    rows = columns.rows_of(_ON_PARAMETERS)
    last = np.full(program.ranks * program.stages, -1)
    np.maximum.at(last, columns.rank[rows] * program.stages + columns.stage[rows], rows)
    kept = np.sort(last[(last >= 0) & (columns.op[last] == _GATHER)])
    ranks, first = np.unique(columns.rank[kept], return_index=True)
    for rank, row in zip(ranks.tolist(), kept[first].tolist(), strict=True):
        if rank in columns.rank[frees]:
            yield int(columns.rank_offsets[rank + 1]) - 1, f"{columns.key(row)} is never freed"


def _latest_compute_waits(program: Program) -> Array:
    """By row, the last action on the compute lane that it waits for, or -1."""
    columns, found = program.columns, np.full(program.columns.rows, -1)
    on_compute = ON_COMPUTE_LANE[columns.wait_op]
    np.maximum.at(found, columns.wait_row[on_compute], columns.action[program.lookup.wait_targets[on_compute]])
    return found


def unmet_waits(of: Array, program: Program, rows: Array, targets: Array) -> Array:
    """Which of these rows do not wait for their target; `of[row]` numbers what may do a row's waiting: the row itself,
    or its action."""
    have = np.sort(of[program.columns.wait_row] * program.columns.rows + program.lookup.wait_targets)
    required = of[rows] * program.columns.rows + targets
    return np.flatnonzero(np.append(have, -1)[np.searchsorted(have, required)] != required)


def prove_gradient_buffers(program: Program) -> None:
    """Proves that a stage takes its place in the pool of gradients only after the REDUCE_SCATTER of all stages that
    were there. Raises ScheduleError."""
    columns, pairs = program.columns, []
    for rank in range(program.ranks):
        sums = gradient_sums(program, rank)
        sharing = stages_sharing_memory(program, sums)
        taken = sums.running & np.array(sharing, object)[sums.stage_index]
        for k in np.flatnonzero(sums.begins & (taken != 0)).tolist():
            row, other = sums.row[k], min(sums.stages[index] for index in bits_of(taken[k]))
            raise error_at(program, row, f"{columns.key(row)} takes the buffer of stage {other}")
        pairs.append(gradient_waits(sums, sharing))
    waiting, waited = np.concatenate(pairs, axis=1)
    for k in unmet_waits(np.arange(columns.rows), program, waiting, waited).tolist():
        text = f"{columns.key(waiting[k])} does not wait for {columns.key(waited[k])}"
        raise error_at(program, waiting[k], text)


def reduces_every_microbatch(program: Program) -> bool:
    """Whether gradients are reduced for every microbatch, and not once a step."""
    columns = program.columns
    return bool((columns.microbatch[columns.rows_of(IS_REDUCTION)] >= 0).any())


def prove_microbatches_apart(program: Program) -> None:
    """Proves that what is reduced for a microbatch is its gradients alone: its first W comes after the reduction of the
    one before. Raises ScheduleError."""
    columns, lookup = program.columns, program.lookup
    weights, complete = columns.rows_of(IS_WEIGHT), complete_weight_grads(program, every_microbatch=True)
    numbers = np.full((lookup.holdings, program.microbatches), -1)  # by holding and microbatch
    holding = lookup.holding(complete.rank, complete.stage)
    numbers[holding, columns.microbatch[complete.row] // program.slices] = complete.number
    holding = lookup.holding(columns.rank[weights], columns.stage[weights])
    number = numbers[holding, columns.microbatch[weights] // program.slices]
    before = lookup.rows(columns.rank[weights], CODE[Op.REDUCE_SCATTER], columns.stage[weights], number - 1)
    late = (number > 0) & (before > weights)
    for k in np.flatnonzero(late).tolist():
        raise error_at(program, weights[k], f"{columns.key(weights[k])} comes before {columns.key(before[k])}")


def _activation_faults(program: Program) -> Iterator[tuple[int, int, str]]:
    """(row where it is found, row that is at fault, what is wrong), several of a row in order."""
    yield from _early_takers(program)
    columns, lookup = program.columns, program.lookup
    rows = columns.rows_of(_ON_ACTIVATIONS)
    rank, (op, stage, number) = columns.rank[rows], columns.keys(rows)
    found = {each: lookup.rows(rank, CODE[each], stage, number) for each in (Op.F, Op.B, Op.BW, *SAVED_ACTIVATION_OPS)}
    forward, offload, reload, recompute = (found[each] for each in (Op.F, *SAVED_ACTIVATION_OPS))
    backward, is_split = np.where(found[Op.B] < 0, found[Op.BW], found[Op.B]), found[Op.B] >= 0
    reader = np.where(recompute < 0, backward, recompute)
    action, copies, is_reload = columns.action, op != CODE[Op.RECOMPUTE], op == CODE[Op.RELOAD]

    def key(k: int, op: Op) -> Key:
        return Key(op, int(stage[k]), int(number[k]))

    between = (forward >= 0) & (backward >= 0) & (action[forward] < action[rows]) & (action[rows] < action[backward])
    for k in np.flatnonzero(~between).tolist():
        last = key(k, Op.B if is_split[k] else Op.BW)
        yield rows[k], rows[k], f"{columns.key(rows[k])} is not between {key(k, Op.F)} and {last}"
    unmet = ~_has_wait(action, program, rows, forward) | (reload < 0)
    for k in np.flatnonzero((op == CODE[Op.OFFLOAD]) & unmet).tolist():
        text = f"does not wait for {key(k, Op.F)}, or {key(k, Op.RELOAD)} is missing"
        yield rows[k], rows[k], f"{key(k, Op.OFFLOAD)} {text}"
    allocating = columns.rows_of(_ALLOCATES)
    newest = np.append(-1, allocating)[np.searchsorted(allocating, rows)]
    known = newest >= columns.rank_offsets[rank]
    for k in np.flatnonzero(copies & known & (_latest_compute_waits(program)[rows] < action[newest])).tolist():
        text = f"does not wait for {columns.key(newest[k])}, whose memory it may get"
        yield rows[k], rows[k], f"{columns.key(rows[k])} {text}"
    for k in np.flatnonzero(is_reload & ~_has_wait(np.arange(columns.rows), program, rows, offload)).tolist():
        yield rows[k], rows[k], f"{key(k, Op.RELOAD)} does not wait for {key(k, Op.OFFLOAD)}"
    for k in np.flatnonzero(is_reload & (_first_takers(program)[offload] >= rows)).tolist():
        text = f"no compute instruction before {key(k, Op.RELOAD)} waits for {key(k, Op.OFFLOAD)}"
        yield rows[k], rows[k], f"{text}, so its memory is never free"
    for k in np.flatnonzero(is_reload & (reader >= 0) & ~_has_wait(action, program, reader, reload)).tolist():
        yield rows[k], reader[k], f"{columns.key(reader[k])} does not wait for {key(k, Op.RELOAD)}"


def _taking(program: Program) -> Array:
    """The waits for an OFFLOAD of instructions that take over the memory it frees."""
    columns = program.columns
    return np.flatnonzero((columns.wait_op == CODE[Op.OFFLOAD]) & _ALLOCATES[columns.op[columns.wait_row]])


def _early_takers(program: Program) -> Iterator[tuple[int, int, str]]:
    """`_activation_faults` of instructions that take over memory in which the next stage may still read its input."""
    columns, waits = program.columns, _taking(program)
    row, stage, number = columns.wait_row[waits], columns.wait_stage[waits], columns.wait_microbatch[waits]
    reader = program.lookup.rows(columns.rank[row], CODE[Op.F], stage + 1, number)
    for k in np.flatnonzero((reader >= 0) & (columns.action[reader] >= columns.action[row])).tolist():
        memory = f"the memory of {columns.wait_key(waits[k])}"
        yield row[k], row[k], f"{columns.key(row[k])} takes over {memory} before {columns.key(reader[k])} has read it"


def _first_takers(program: Program) -> Array:
    """By row of an OFFLOAD, the first row that takes over its memory, or a row beyond all."""
    columns, waits, found = program.columns, _taking(program), np.full(program.columns.rows + 1, program.columns.rows)
    np.minimum.at(found, program.lookup.wait_targets[waits], columns.wait_row[waits])
    return found


def _has_wait(of: Array, program: Program, rows: Array, targets: Array) -> Array:
    """Whether each row waits for its target, -1 for none; `of` as in `unmet_waits`."""
    found = targets >= 0
    found[unmet_waits(of, program, rows, targets)] = False
    return found


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
