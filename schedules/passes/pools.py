"""Buffers that take turns: the whole weights and gradients of stages whose holders keep shards (ZeRO 2 and 3).

A rank needs as many as its program has whole at once; which stage has which is decided here, once for the workers and
for the estimate. Mirrors keep one a stage: what one waits for, the other might hold up.
"""

from __future__ import annotations

from pentad.schedules.ir.instruction import Key, Op, units_of
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert

Slots = dict[tuple[int, int], int]  # stage and turn -> number of the buffer


def weight_slots(program: Program, rank: int) -> Slots:
    """Of the k-th gather of a stage; from ALL_GATHER to FREE it has the buffer for itself."""
    cut, free, slots = shards_of(program, rank), list[int](), Slots()
    for part in units_of(program.streams[rank]):
        if part.stage not in cut:
            continue
        if part.op is Op.ALL_GATHER:
            slots[part.stage, part.microbatch] = free.pop() if free else len(set(slots.values()))
        elif part.op is Op.FREE:
            free.append(slots[part.stage, part.microbatch])
    return slots


def gradient_slots(program: Program, rank: int) -> tuple[Slots, dict[Key, Key]]:
    """Of a stage (turn 0); it has the buffer for itself from its first W to its REDUCE_SCATTER. And, by the key of that
    W, the REDUCE_SCATTER it waits for: the one that has emptied the buffer, never the latest, which runs meanwhile."""
    cut, free, slots, waits = shards_of(program, rank), list[Key](), Slots(), dict[Key, Key]()
    for part in units_of(program.streams[rank]):
        if part.op in (Op.W, Op.BW) and part.stage in cut and (part.stage, 0) not in slots:
            if len(free) > 1:
                waits[part.key] = free.pop(0)
                slots[part.stage, 0] = slots[waits[part.key].stage, 0]
            else:
                slots[part.stage, 0] = len(set(slots.values()))
        elif part.op is Op.REDUCE_SCATTER and part.microbatch < 1 and len(program.holders(part.stage)) == 1:
            # the last one of its buckets
            free.append(part.key)
    return slots, waits


def shards_of(program: Program, rank: int) -> set[int]:
    """Stages of which the rank keeps a shard."""
    return {part.stage for part in units_of(program.streams[rank]) if part.op is Op.REDUCE_SCATTER}


def add_turns(program: Program) -> Program:
    """The program with the waits that turns on gradient buffers need."""
    found = {
        (rank, key): (emptied,)
        for rank in range(program.ranks)
        for key, emptied in gradient_slots(program, rank)[1].items()
    }
    return insert(program, (), found)
