"""Pass of ZeRO (arXiv 1910.02054, section 5): when a rank gathers a stage's parameters.

ZeRO-1 and ZeRO-2 gather every pipeline stage once a step, after its holders have updated their shards. ZeRO-3 keeps the
gathered parameters of some stages only: a stage is gathered again for its next reader, and evicts the one whose next
reader is furthest away (Belady 1966). A rank with room for all its stages gathers each once a step, whatever the number
of microbatches.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, Columns, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, Wait, insert

READERS = frozenset({Op.F, Op.B, Op.BW, Op.RECOMPUTE})  # of parameters; W needs only what B saved
_IS_READER = op_mask(READERS)


class Gather(NamedTuple):
    """The `number`-th time that a rank gathers a stage, read by actions `first`, of which `reader` is a part, to `last`
    of its stream. There is room for it after action `freed`, -1 if there is from the start."""

    stage: int
    number: int
    reader: Key
    first: int
    last: int
    freed: int = -1


Reads = list[tuple[int, list[Key]]]  # of parameters on a rank, by action: its index, and the instructions that read


def add_gathers(program: Program, *, zero: int, prefetch: int = 1, max_gathered: int | None = None) -> Program:
    """ALL_GATHER of every stage before it is read and, with `zero` 3, FREE after its last reader; the microbatch field
    of both numbers the gathers of a stage.

    A rank holds at most `max_gathered` stages at once (None: all its stages). A gather goes `prefetch` compute actions
    before its reader, for which the rank keeps room, or later if there is none. Raises PentadError when that is too few
    stages for an action of the program, or for DualPipe mirrors, which must gather together.
    """
    frees: list[Addition] = []
    added: list[Addition] = []
    waits: list[Wait] = []
    for rank, held in enumerate(program.placement):
        reads, room, ahead = _reads(program, rank), len(held), 0
        if zero == 3 and max_gathered is not None and max_gathered < room:
            least = _check_room(program, rank, reads, max_gathered)
            room, ahead = max_gathered, min(prefetch, max_gathered - least)
        compute = _compute_actions(program, rank)
        gathers = sorted(_gathers(reads, room - ahead, ahead), key=lambda gather: gather.stage)
        ends = sorted((gather.last + 1, Key(Op.FREE, gather.stage, gather.number)) for gather in gathers)
        end_positions = [position for position, _ in ends]
        for gather in gathers:
            key, group = Key(Op.ALL_GATHER, gather.stage, gather.number), f"stage{gather.stage}"
            position = _position(compute, gather, prefetch)
            ended = bisect.bisect_right(end_positions, position)
            after = (ends[ended - 1][1],) if gather.freed >= 0 else ()
            added.append((rank, position, Instruction(*key, group=group, waits=after)))
            waits.append((rank, gather.reader, key))
        frees += [(rank, position, Instruction(*key)) for position, key in ends]
    # At one position, frees come before gathers.
    return insert(program, frees + added if zero == 3 else added, waits)


def _reads(program: Program, rank: int) -> Reads:
    columns, found = program.columns, Reads()
    rows = rows_of_rank(program, rank, _IS_READER)
    actions = (columns.action[rows] - columns.action_offsets[rank]).tolist()
    for action, key in zip(actions, keys_of(columns, rows), strict=True):
        if found and found[-1][0] == action:
            found[-1][1].append(key)
        else:
            found.append((action, [key]))
    return found


def _compute_actions(program: Program, rank: int) -> list[int]:
    """The indices of a rank's compute actions."""
    columns, rows = program.columns, rows_of_rank(program, rank, IS_COMPUTE)
    actions: list[int] = (columns.action[rows[~columns.is_second[rows]]] - columns.action_offsets[rank]).tolist()
    return actions


def rows_of_rank(program: Program, rank: int, mask: Array) -> Array:
    first, end = program.columns.rank_offsets[rank : rank + 2]
    rows: Array = first + np.flatnonzero(mask[program.columns.op[first:end]])
    return rows


def keys_of(columns: Columns, rows: Array) -> list[Key]:
    parts = (part[rows].tolist() for part in (columns.op, columns.stage, columns.microbatch))
    return [Key(OPS[op], stage, microbatch) for op, stage, microbatch in zip(*parts, strict=True)]


def _gathers(reads: Reads, room: int, ahead: int) -> list[Gather]:
    """With `room` for stages that stay gathered between readers, and for `ahead` more that are gathered early."""
    following, later = list[list[int]](), dict[int, int]()  # by read, where each of its stages is read next
    for index, keys in reversed(reads):
        following.append([later.get(key.stage, sys.maxsize) for key in keys])
        later.update((key.stage, index) for key in keys)
    held: dict[int, Gather] = {}
    next_read, before = dict[int, int](), dict[int, int]()  # by stage: its next reader, the last one of its last gather
    counts: Counter[int] = Counter()
    gathers, last_reads = list[Gather](), list[int]()  # of what was evicted, up to each time
    for (index, keys), following_reads in zip(reads, reversed(following), strict=True):
        needed = {key.stage: key for key in keys}
        for stage in sorted(needed.keys() - held.keys()):
            if len(held) == room:
                victim = max(held.keys() - needed.keys(), key=lambda stage: (next_read[stage], stage))
                gathers.append(held.pop(victim))
                before[victim] = gathers[-1].last
                last_reads.append(max([gathers[-1].last, *last_reads[-1:]]))
            freed = max(last_reads[-1 - ahead] if len(last_reads) > ahead else -1, before.get(stage, -1))
            held[stage] = Gather(stage, counts[stage], needed[stage], index, index, freed)
            counts[stage] += 1
        for key, following_read in zip(keys, following_reads, strict=True):
            held[key.stage] = held[key.stage]._replace(last=index)
            next_read[key.stage] = following_read
    return gathers + list(held.values())


def _position(compute: list[int], gather: Gather, prefetch: int) -> int:
    """Where a gather goes: at the start of the stream unless it has to wait for room."""
    if gather.freed < 0:
        return 0
    if prefetch == 0:
        return gather.first
    place = bisect.bisect_left(compute, gather.first) - prefetch
    return max(gather.freed + 1, compute[place] if place >= 0 else 0)


def _check_room(program: Program, rank: int, reads: Reads, max_gathered: int) -> int:
    """The least stages that a rank has to hold at once. Raises PentadError if it may not."""
    held = program.placement[rank]
    where = f"rank {rank} of schedule {program.name}"
    if any(len(program.holders(stage)) > 1 for stage in held):
        least, why = len(held), f"{where} gathers that many stages together with their mirrors"
    else:
        least = max(len({key.stage for key in keys}) for _, keys in reads)
        why = f"one action on {where} reads that many stages"
    if max_gathered < least:
        raise PentadError(f"zero.max_gathered is {max_gathered}: expected at least {least}, because {why}")
    return least
