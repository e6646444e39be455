"""Pass for ZeRO (arXiv 1910.02054, section 5): when a rank gathers a stage's parameters.

ZeRO-1 and ZeRO-2 gather every pipeline stage once a step, after its holders have updated their shards. ZeRO-3 keeps the
gathered parameters of some stages only: a stage is gathered again for its next reader, and evicts the one whose next
reader is furthest away (Belady 1966). A rank with room for all its stages gathers each once a step, whatever the number
of microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, key_columns, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert_rows

# Ops that read parameters. W needs only what B saved, unless it computes logits.
_IS_READER = op_mask({Op.F, Op.B, Op.BW, Op.RECOMPUTE})


class Reads(NamedTuple):
    """A rank's reads of parameters, sorted by action and then stage: the action of its stream, the stage and the row;
    where an action reads a stage twice, the second row."""

    action: Array
    stage: Array
    row: Array


class Gathers(NamedTuple):
    """A rank's gathers, sorted by stage and then `number`, which counts the gathers of a stage. Each is read by actions
    `first` (in row `reader`) to `last` of the stream; there is room for it after action `freed` (-1: from the
    start)."""

    stage: Array
    number: Array
    reader: Array
    first: Array
    last: Array
    freed: Array


def add_gathers(program: Program, *, zero: int, prefetch: int = 1, max_gathered: int | None = None) -> Program:
    """Adds an ALL_GATHER of every stage before it is read and, with `zero` 3, a FREE after its last reader; the
    microbatch field of both numbers the gathers of a stage.

    A rank holds at most `max_gathered` stages at once (None: all its stages). A gather goes `prefetch` compute actions
    before its reader, for which the rank keeps room, or later if there is none. Mirrored ranks read their stages in the
    same actions, and so gather together. Raises PentadError if `max_gathered` is too few for an action of the program.
    """
    by_rank, readers = [], np.flatnonzero(is_reader(program))
    for rank, held in enumerate(program.placement):
        reads, room, ahead = _reads(program, rank, readers), len(held), 0
        if zero == 3 and max_gathered is not None and max_gathered < room:
            least = _check_room(program, rank, reads, max_gathered)
            room, ahead = max_gathered, min(prefetch, max_gathered - least)
        gathers = _gathers(reads, room - ahead, ahead)
        by_rank.append(_placed(_compute_actions(program, rank), gathers, prefetch=prefetch))
    counts = [len(placed.stage) for placed in by_rank]
    placed, ranks = Placed(*map(np.concatenate, zip(*by_rank, strict=True))), np.repeat(np.arange(len(counts)), counts)
    return _inserted(program, placed, ranks, with_frees=zero == 3)


class Placed(NamedTuple):
    """Gathers as arrays: each goes before action `position` of its rank, is freed before action `end`, and waits for
    the FREE of gather `freed_number` of `freed_stage` (-1: for none)."""

    stage: Array
    number: Array
    reader: Array
    position: Array
    end: Array
    freed_stage: Array
    freed_number: Array


def _placed(compute: Array, gathers: Gathers, *, prefetch: int) -> Placed:
    """A gather goes at the start of the stream unless it has to wait for room, and waits for the last FREE before
    it."""
    stage, number, reader, first, last, freed = gathers
    place = np.searchsorted(compute, first) - prefetch
    early = np.where(place >= 0, compute[np.maximum(place, 0)], 0) if prefetch and len(compute) else first
    position = np.where(freed < 0, 0, np.maximum(freed + 1, early) if prefetch else first)
    end = last + 1
    order = np.lexsort((number, stage, end))
    before = order[np.searchsorted(end[order], position, side="right") - 1]
    freed_stage, freed_number = (np.where(freed < 0, -1, each[before]) for each in (stage, number))
    return Placed(stage, number, reader, position, end, freed_stage, freed_number)


def _inserted(program: Program, placed: Placed, ranks: Array, *, with_frees: bool) -> Program:
    """The program with these gathers, and the waits of their readers. At one position, frees come before gathers."""
    columns, count = program.columns, len(ranks)
    gather, free = (np.full(count, CODE[op]) for op in (Op.ALL_GATHER, Op.FREE))
    order = np.lexsort((placed.number, placed.stage, placed.end, ranks))
    names = sorted(f"stage{stage}" for stage in np.unique(placed.stage).tolist())
    numbers = np.zeros(program.stages, np.int32)
    numbers[[int(name.removeprefix("stage")) for name in names]] = np.arange(1, len(names) + 1)
    whole = np.array([0, count])
    gathers = key_columns(whole, gather, placed.stage, placed.number)
    gathers = replace(gathers, groups=("", *names), group=numbers[placed.stage])
    waiting = np.flatnonzero(placed.freed_stage >= 0)
    keys = free[waiting], placed.freed_stage[waiting], placed.freed_number[waiting]
    added, before, on = gathers.with_waits(waiting, *keys), placed.position, ranks
    if with_frees:
        frees = key_columns(whole, free, placed.stage[order], placed.number[order])
        added, before = frees + added, np.concatenate((placed.end[order], before))
        on = np.concatenate((ranks[order], ranks))
    before = columns.row_before(columns.action_offsets[on] + before)
    columns = columns.with_waits(placed.reader, gather, placed.stage, placed.number)
    return program.with_streams(insert_rows(columns, added, on, before))


def is_reader(program: Program) -> Array:
    """[rows] bool: whether the instruction reads parameters."""
    columns = program.columns
    found: Array = _IS_READER[columns.op]
    if program.logits_in_w:
        found = found | ((columns.op == CODE[Op.W]) & (columns.stage == program.stages - 1))
    return found


def _reads(program: Program, rank: int, readers: Array) -> Reads:
    """The reads of a rank, given the rows of all readers."""
    columns = program.columns
    rows = readers[slice(*np.searchsorted(readers, columns.rank_offsets[rank : rank + 2]))]
    action, stage = columns.action[rows] - columns.action_offsets[rank], columns.stage[rows]
    order = np.lexsort((rows, stage, action))
    action, stage, rows = action[order], stage[order], rows[order]
    is_last = np.append((np.diff(action) != 0) | (np.diff(stage) != 0), True)[: len(rows)]
    return Reads(action[is_last], stage[is_last], rows[is_last])


def _compute_actions(program: Program, rank: int) -> Array:
    """The indices of a rank's compute actions."""
    columns, rows = program.columns, rows_of_rank(program, rank, IS_COMPUTE)
    actions: Array = columns.action[rows[~columns.is_second[rows]]] - columns.action_offsets[rank]
    return actions


def rows_of_rank(program: Program, rank: int, mask: Array) -> Array:
    first, end = program.columns.rank_offsets[rank : rank + 2]
    rows: Array = first + np.flatnonzero(mask[program.columns.op[first:end]])
    return rows


def _gathers(reads: Reads, room: int, ahead: int) -> Gathers:
    """The gathers of a rank with `room` for stages that stay gathered between readers, and for `ahead` more that are
    gathered early."""
    firsts, lasts, evicted = _evictions(reads, room)
    stage, first, last = reads.stage[firsts], reads.action[firsts], reads.action[lasts]
    # Each gather after the first `room` evicts one; the space of the last `ahead` evicted ones is for early gathers.
    freed_by, freed = np.arange(len(firsts)) - room - ahead, np.full(len(firsts), -1)
    freed[freed_by >= 0] = np.maximum.accumulate(last[evicted])[freed_by[freed_by >= 0]]
    order = np.argsort(stage, kind="stable")
    stage, first, last, freed = stage[order], first[order], last[order], freed[order]
    is_again = np.append(False, stage[1:] == stage[:-1])[: len(stage)]
    freed = np.maximum(freed, np.where(is_again, np.roll(last, 1), -1))
    at = np.arange(len(stage))
    number = at - np.maximum.accumulate(np.where(is_again, 0, at))
    return Gathers(stage, number, reads.row[firsts[order]], first, last, freed)


def _evictions(reads: Reads, room: int) -> tuple[Array, Array, Array]:
    """Indices of the first and of the last read of each gather, in order; and the evicted gathers, in order. The victim
    is the stage whose next read is furthest away, of those that the current action does not read; of several, the
    highest."""
    stages = int(reads.stage.max(initial=-1)) + 1
    urgency = (_following(reads) * stages + reads.stage).tolist()
    begins = np.searchsorted(reads.action, reads.action).tolist()
    firsts, lasts, evicted = list[int](), list[int](), list[int]()
    held, gather = dict[int, int](), dict[int, int]()  # by stage: how urgent it is, the number of its gather
    for index, (stage, begin, due) in enumerate(zip(reads.stage.tolist(), begins, urgency, strict=True)):
        if stage not in held:
            if len(held) == room:
                read = urgency[begin:index]
                victim = max([each for each in held.values() if each not in read] if read else held.values()) % stages
                del held[victim]
                evicted.append(gather[victim])
            gather[stage] = len(firsts)
            firsts.append(index)
            lasts.append(index)
        held[stage] = due
        lasts[gather[stage]] = index
    return np.array(firsts, int), np.array(lasts, int), np.array(evicted, int)


def _following(reads: Reads) -> Array:
    """For each read, the action that reads the stage next; after the last read, an action beyond all."""
    order, found = np.argsort(reads.stage, kind="stable"), np.full(len(reads.action), reads.action.max(initial=0) + 1)
    is_read_again = np.diff(reads.stage[order]) == 0
    found[order[:-1][is_read_again]] = reads.action[order[1:][is_read_again]]
    return found


def _check_room(program: Program, rank: int, reads: Reads, max_gathered: int) -> int:
    """The least number of stages that a rank has to hold at once. Raises PentadError if `max_gathered` is less."""
    least = int(np.unique_counts(reads.action).counts.max(initial=0))
    if max_gathered < least:
        why = f"one action on rank {rank} of schedule {program.name} reads that many stages"
        raise PentadError(f"zero.max_gathered is {max_gathered}: expected at least {least}, because {why}")
    return least
