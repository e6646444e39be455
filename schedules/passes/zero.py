"""Pass of ZeRO (arXiv 1910.02054, section 5): when a rank gathers a stage's parameters, and which buffers hold what.

ZeRO-1 and ZeRO-2 gather every pipeline stage once a step, after its holders have updated their shards. ZeRO-3 keeps the
gathered parameters of some stages only: a stage is gathered again for its next reader, and evicts the one whose next
reader is furthest away (Belady 1966). A rank with room for all its stages gathers each once a step, whatever the number
of microbatches.

The gathered weights (ZeRO-3) and the gradients (ZeRO-2 and 3) of stages share buffers; `weight_slots` and
`gradient_slots` decide which stage uses which, for workers and estimates alike.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, Columns, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Key, Op, instructions_of
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, Wait, insert

READERS = frozenset({Op.F, Op.B, Op.BW, Op.RECOMPUTE})  # of parameters; W needs only what B saved
_IS_READER, _IS_SCATTER = op_mask(READERS), op_mask({Op.REDUCE_SCATTER})
BufferSlots = dict[tuple[int, int], int]  # (stage, number of the gather) -> buffer


class Gather(NamedTuple):
    """The `number`-th time that a rank gathers a stage, read by actions `first`, of which `reader` is a part, to `last`
    of its stream. `evicted` is the index of the last reader of the stage that it replaces, -1 if it replaces none."""

    stage: int
    number: int
    reader: Key
    first: int
    last: int
    evicted: int = -1


Reads = list[tuple[int, list[Key]]]  # of parameters on a rank, by action: its index, and the instructions that read


def add_gathers(program: Program, *, zero: int, prefetch: int = 1, max_gathered: int | None = None) -> Program:
    """ALL_GATHER of every stage before it is read and, with `zero` 3, FREE after its last reader; the microbatch field
    of both numbers the gathers of a stage.

    A rank holds at most `max_gathered` stages at once, including those being gathered (None: all its stages). A gather
    goes `prefetch` compute actions before its reader, or later if there is no room. Raises PentadError when that is too
    few stages for an action of the program, or for DualPipe mirrors, which must gather together.
    """
    frees: list[Addition] = []
    added: list[Addition] = []
    waits: list[Wait] = []
    for rank, held in enumerate(program.placement):
        reads, room = _reads(program, rank), len(held)
        if zero == 3 and max_gathered is not None:
            _check_room(program, rank, reads, max_gathered)
            room = max_gathered
        compute = _compute_actions(program, rank)
        gathers = sorted(_gathers(reads, room), key=lambda gather: gather.stage)
        ends = sorted((gather.last + 1, Key(Op.FREE, gather.stage, gather.number)) for gather in gathers)
        end_positions = [position for position, _ in ends]
        for gather in gathers:
            key, group = Key(Op.ALL_GATHER, gather.stage, gather.number), f"stage{gather.stage}"
            position = _position(compute, gather, prefetch)
            ended = bisect.bisect_right(end_positions, position)
            after = (ends[ended - 1][1],) if gather.evicted >= 0 else ()
            added.append((rank, position, Instruction(*key, group=group, waits=after)))
            waits.append((rank, gather.reader, key))
        frees += [(rank, position, Instruction(*key)) for position, key in ends]
    # At one position, frees come before gathers.
    return insert(program, frees + added if zero == 3 else added, waits)


def _reads(program: Program, rank: int) -> Reads:
    columns, found = program.columns, Reads()
    rows = _rows_of_rank(program, rank, _IS_READER)
    actions = (columns.action[rows] - columns.action_offsets[rank]).tolist()
    for action, key in zip(actions, _keys(columns, rows), strict=True):
        if found and found[-1][0] == action:
            found[-1][1].append(key)
        else:
            found.append((action, [key]))
    return found


def _compute_actions(program: Program, rank: int) -> list[int]:
    """The indices of a rank's compute actions."""
    columns, rows = program.columns, _rows_of_rank(program, rank, IS_COMPUTE)
    actions: list[int] = (columns.action[rows[~columns.is_second[rows]]] - columns.action_offsets[rank]).tolist()
    return actions


def _rows_of_rank(program: Program, rank: int, mask: Array) -> Array:
    first, end = program.columns.rank_offsets[rank : rank + 2]
    rows: Array = first + np.flatnonzero(mask[program.columns.op[first:end]])
    return rows


def _keys(columns: Columns, rows: Array) -> list[Key]:
    parts = (part[rows].tolist() for part in (columns.op, columns.stage, columns.microbatch))
    return [Key(OPS[op], stage, microbatch) for op, stage, microbatch in zip(*parts, strict=True)]


def _gathers(reads: Reads, room: int) -> list[Gather]:
    following, later = list[list[int]](), dict[int, int]()  # by read, where each of its stages is read next
    for index, keys in reversed(reads):
        following.append([later.get(key.stage, sys.maxsize) for key in keys])
        later.update((key.stage, index) for key in keys)
    held: dict[int, Gather] = {}
    next_read: dict[int, int] = {}
    counts: Counter[int] = Counter()
    gathers = []
    for (index, keys), following_reads in zip(reads, reversed(following), strict=True):
        needed = {key.stage: key for key in keys}
        for stage in sorted(needed.keys() - held.keys()):
            evicted = -1
            if len(held) == room:
                victim = max(held.keys() - needed.keys(), key=lambda stage: (next_read[stage], stage))
                gathers.append(held[victim])
                evicted = held.pop(victim).last
            held[stage] = Gather(stage, counts[stage], needed[stage], index, index, evicted)
            counts[stage] += 1
        for key, following_read in zip(keys, following_reads, strict=True):
            held[key.stage] = held[key.stage]._replace(last=index)
            next_read[key.stage] = following_read
    return gathers + list(held.values())


def _position(compute: list[int], gather: Gather, prefetch: int) -> int:
    """Where a gather goes: at the start of the stream unless it has to wait for room."""
    if gather.evicted < 0:
        return 0
    if prefetch == 0:
        return gather.first
    place = bisect.bisect_left(compute, gather.first) - prefetch
    return max(gather.evicted + 1, compute[place] if place >= 0 else 0)


def _check_room(program: Program, rank: int, reads: Reads, max_gathered: int) -> None:
    held = program.placement[rank]
    where = f"rank {rank} of schedule {program.name}"
    if any(len(program.holders(stage)) > 1 for stage in held):
        least, why = len(held), f"{where} gathers that many stages together with their mirrors"
    else:
        least = max(len({key.stage for key in keys}) for _, keys in reads)
        why = f"one action on {where} reads that many stages"
    if max_gathered < least:
        raise PentadError(f"zero.max_gathered is {max_gathered}: expected at least {least}, because {why}")


def weight_slots(program: Program, rank: int, sharded: set[int]) -> BufferSlots:
    """The buffer of each gather of `sharded` stages on a rank, which is its own from ALL_GATHER to FREE."""
    free, slots = list[int](), BufferSlots()
    for part in instructions_of(program.streams[rank]):
        if part.stage not in sharded:
            continue
        if part.op is Op.ALL_GATHER:
            slots[part.stage, part.microbatch] = free.pop() if free else len(set(slots.values()))
        elif part.op is Op.FREE:
            free.append(slots[part.stage, part.microbatch])
    return slots


def gradient_slots(program: Program, rank: int) -> tuple[BufferSlots, list[tuple[Key, Key]]]:
    """The gradient buffer of each (stage, 0) on a rank, which is its own from the first W of a step, or of a microbatch
    where that is reduced, to the REDUCE_SCATTER; and which such W has to wait for which REDUCE_SCATTER: that of the
    buffer's owner before, and the last one of its own stage, whose sum it continues.

    A stage takes over a buffer only when another one is free too: the last REDUCE_SCATTER then runs beside its W. A
    DualPipe stage keeps its buffer, because waiting for it could block its mirror.
    """
    slots, waits, together = BufferSlots(), list[tuple[Key, Key]](), _accumulating_together(program, rank)
    free, reduced = list[int](), dict[tuple[str, int], Key]()  # the last REDUCE_SCATTER of a slot, and of a stage
    for begins, key in _accumulations(program, rank):
        place = key.stage, 0
        if begins:
            if place not in slots:
                taken = {slots.get((other, 0)) for other in together[key.stage]}
                usable = [slot for slot in free if slot not in taken]
                slots[place] = usable[0] if usable and len(free) > 1 else len(set(slots.values()))
            before = reduced.get(("slot", slots[place])), reduced.get(("stage", key.stage))
            waits += [(key, each) for each in dict.fromkeys(before) if each is not None]
            free = [slot for slot in free if slot != slots[place]]
        elif len(program.holders(key.stage)) == 1:
            free.append(slots[place])
            reduced["slot", slots[place]] = reduced["stage", key.stage] = key
    return slots, waits


def _accumulations(program: Program, rank: int) -> Iterator[tuple[bool, Key]]:
    """Of each sum of gradients on a rank in turn the first W, with True, and the REDUCE_SCATTER."""
    sharded, running = sharded_stages(program, rank), set[int]()
    rows = _rows_of_rank(program, rank, IS_WEIGHT | _IS_SCATTER)
    for key in _keys(program.columns, rows):
        if key.op is Op.REDUCE_SCATTER:
            running.discard(key.stage)
            yield False, key
        elif key.stage in sharded and key.stage not in running:
            running.add(key.stage)
            yield True, key


def _accumulating_together(program: Program, rank: int) -> dict[int, set[int]]:
    """By stage, those that accumulate gradients while it does: they need buffers of their own."""
    running, found = set[int](), defaultdict[int, set[int]](set)
    for begins, key in _accumulations(program, rank):
        if begins:
            for other in running:
                found[key.stage].add(other)
                found[other].add(key.stage)
            running.add(key.stage)
        else:
            running.discard(key.stage)
    return found


def num_gradient_buffers(program: Program) -> int:
    """The most gradient buffers of any rank."""
    return max(len(set(gradient_slots(program, rank)[0].values())) for rank in range(program.ranks))


def sharded_stages(program: Program, rank: int) -> set[int]:
    """Stages of which a rank holds a ZeRO shard."""
    return set(program.columns.stage[_rows_of_rank(program, rank, _IS_SCATTER)].tolist())


def add_gradient_buffer_waits(program: Program) -> Program:
    """The waits of `gradient_slots`."""
    ranks = range(program.ranks)
    return insert(program, (), [(rank, *wait) for rank in ranks for wait in gradient_slots(program, rank)[1]])
