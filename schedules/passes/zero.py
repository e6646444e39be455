"""Pass of ZeRO (arXiv 1910.02054, section 5): when a rank gathers a stage's parameters.

ZeRO-1 and ZeRO-2 gather every pipeline stage once a step, after its holders have updated their shards. ZeRO-3 keeps the
gathered parameters of some stages only: a stage is gathered again for its next reader, and evicts the one whose next
reader is furthest away (Belady 1966). A rank with room for all its stages gathers each once a step, whatever the number
of microbatches.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, key_columns, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert_rows

READERS = frozenset({Op.F, Op.B, Op.BW, Op.RECOMPUTE})  # of parameters; W needs only what B saved
_IS_READER = op_mask(READERS)


class Gather(NamedTuple):
    """The `number`-th time that a rank gathers a stage, read by actions `first`, in row `reader`, to `last` of its
    stream. There is room for it after action `freed`, -1 if there is from the start."""

    stage: int
    number: int
    reader: int
    first: int
    last: int
    freed: int


Read = tuple[int, list[tuple[int, int]]]  # of parameters on a rank: the action, and (stage, row) of what reads in it


def add_gathers(program: Program, *, zero: int, prefetch: int = 1, max_gathered: int | None = None) -> Program:
    """ALL_GATHER of every stage before it is read and, with `zero` 3, FREE after its last reader; the microbatch field
    of both numbers the gathers of a stage.

    A rank holds at most `max_gathered` stages at once (None: all its stages). A gather goes `prefetch` compute actions
    before its reader, for which the rank keeps room, or later if there is none. Raises PentadError when that is too few
    stages for an action of the program, or for DualPipe mirrors, which must gather together.
    """
    by_rank = []
    for rank, held in enumerate(program.placement):
        reads, room, ahead = _reads(program, rank), len(held), 0
        if zero == 3 and max_gathered is not None and max_gathered < room:
            least = _check_room(program, rank, reads, max_gathered)
            room, ahead = max_gathered, min(prefetch, max_gathered - least)
        gathers = sorted(_gathers(reads, room - ahead, ahead), key=lambda gather: gather.stage)
        found = np.array(gathers, np.int64).reshape(-1, len(Gather._fields)).T
        by_rank.append(_placed(_compute_actions(program, rank), *found, prefetch=prefetch))
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


def _placed(
    compute: Array,
    stage: Array,
    number: Array,
    reader: Array,
    first: Array,
    last: Array,
    freed: Array,
    *,
    prefetch: int,
) -> Placed:
    """A gather goes at the start of the stream unless it has to wait for room, and waits for the last FREE before."""
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
    names = sorted({f"stage{stage}" for stage in placed.stage.tolist()})
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


def _reads(program: Program, rank: int) -> list[Read]:
    columns, found = program.columns, list[Read]()
    rows = rows_of_rank(program, rank, _IS_READER)
    actions = (columns.action[rows] - columns.action_offsets[rank]).tolist()
    for action, stage, row in zip(actions, columns.stage[rows].tolist(), rows.tolist(), strict=True):
        if found and found[-1][0] == action:
            found[-1][1].append((stage, row))
        else:
            found.append((action, [(stage, row)]))
    return found


def _compute_actions(program: Program, rank: int) -> Array:
    """The indices of a rank's compute actions."""
    columns, rows = program.columns, rows_of_rank(program, rank, IS_COMPUTE)
    actions: Array = columns.action[rows[~columns.is_second[rows]]] - columns.action_offsets[rank]
    return actions


def rows_of_rank(program: Program, rank: int, mask: Array) -> Array:
    first, end = program.columns.rank_offsets[rank : rank + 2]
    rows: Array = first + np.flatnonzero(mask[program.columns.op[first:end]])
    return rows


def _gathers(reads: list[Read], room: int, ahead: int) -> list[Gather]:
    """With `room` for stages that stay gathered between readers, and for `ahead` more that are gathered early."""
    following = _following_reads(reads)
    held = dict[int, tuple[int, int, int, int]]()  # by stage: number, reader, first, freed
    next_read, last, ended = dict[int, int](), dict[int, int](), dict[int, int]()  # by stage; last of its last gather
    counts: Counter[int] = Counter()
    gathers, last_reads = list[Gather](), list[int]()  # of what was evicted, up to each time
    for (index, readers), following_reads in zip(reads, following, strict=True):
        if missing := sorted(reader for reader in dict(readers).items() if reader[0] not in held):
            needed = dict(readers)
            for stage, row in missing:
                if len(held) == room:
                    victim = max((next_read[other], other) for other in held if other not in needed)[1]
                    number, reader, first, freed = held.pop(victim)
                    gathers.append(Gather(victim, number, reader, first, last[victim], freed))
                    ended[victim] = last[victim]
                    last_reads.append(max(last[victim], last_reads[-1] if last_reads else -1))
                freed = max(last_reads[-1 - ahead] if len(last_reads) > ahead else -1, ended.get(stage, -1))
                held[stage] = (counts[stage], row, index, freed)
                counts[stage] += 1
        for (stage, _), following_read in zip(readers, following_reads, strict=True):
            last[stage], next_read[stage] = index, following_read
    kept = (
        Gather(stage, number, reader, first, last[stage], freed)
        for stage, (number, reader, first, freed) in held.items()
    )
    return [*gathers, *kept]


def _following_reads(reads: list[Read]) -> list[list[int]]:
    """By read, where each of its stages is read next."""
    following, later = list[list[int]](), dict[int, int]()
    for index, readers in reversed(reads):
        following.append([later.get(stage, sys.maxsize) for stage, _ in readers])
        for stage, _ in readers:
            later[stage] = index
    return following[::-1]


def _check_room(program: Program, rank: int, reads: list[Read], max_gathered: int) -> int:
    """The least stages that a rank has to hold at once. Raises PentadError if it may not."""
    held = program.placement[rank]
    where = f"rank {rank} of schedule {program.name}"
    if any(len(program.holders(stage)) > 1 for stage in held):
        least, why = len(held), f"{where} gathers that many stages together with their mirrors"
    else:
        least = max(len(dict(readers)) for _, readers in reads)
        why = f"one action on {where} reads that many stages"
    if max_gathered < least:
        raise PentadError(f"zero.max_gathered is {max_gathered}: expected at least {least}, because {why}")
    return least
