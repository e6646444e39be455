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
from collections import Counter
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Action, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, Wait, insert

READERS = frozenset({Op.F, Op.B, Op.BW, Op.RECOMPUTE})  # of parameters; W needs only what B saved
BufferSlots = dict[tuple[int, int], int]  # (stage, number of the gather) -> buffer


class Gather(NamedTuple):
    """The `number`-th time that a rank gathers a stage, read by actions `first` to `last` of its stream. `evicted` is
    the index of the last reader of the stage that it replaces, -1 if it replaces none."""

    stage: int
    number: int
    first: int
    last: int
    evicted: int = -1


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
    if zero < 3:
        max_gathered = None
    if max_gathered is not None:
        _check_room(program, max_gathered)
    for rank, stream in enumerate(program.streams):
        room = len(program.placement[rank]) if max_gathered is None else max_gathered
        gathers = sorted(_gathers(stream, room), key=lambda gather: gather.stage)
        ends = sorted((gather.last + 1, Key(Op.FREE, gather.stage, gather.number)) for gather in gathers)
        for gather in gathers:
            key = Key(Op.ALL_GATHER, gather.stage, gather.number)
            position = _position(stream, gather, prefetch)
            ended = bisect.bisect_right(ends, position, key=lambda end: end[0])
            after = (ends[ended - 1][1],) if gather.evicted >= 0 else ()
            added.append((rank, position, Instruction(*key, group=f"stage{gather.stage}", waits=after)))
            reader = next(part.key for part in stream[gather.first].parts if part.stage == gather.stage)
            waits.append((rank, reader, key))
        frees += [(rank, position, Instruction(*key)) for position, key in ends]
    # At one position, frees come before gathers.
    return insert(program, frees + added if zero == 3 else added, waits)


def _gathers(stream: Stream, room: int) -> list[Gather]:
    uses: dict[int, list[int]] = {}
    for index, action in enumerate(stream):
        for stage in _stages_read(action):
            uses.setdefault(stage, []).append(index)
    held: dict[int, Gather] = {}
    counts: Counter[int] = Counter()
    gathers = []
    for index, action in enumerate(stream):
        needed = _stages_read(action)
        for stage in sorted(needed - held.keys()):
            evicted = -1
            if len(held) == room:
                victim = max(held.keys() - needed, key=lambda stage: (_next_use(uses[stage], index), stage))
                gathers.append(held[victim])
                evicted = held.pop(victim).last
            held[stage] = Gather(stage, counts[stage], index, index, evicted)
            counts[stage] += 1
        for stage in needed:
            held[stage] = held[stage]._replace(last=index)
    return gathers + list(held.values())


def _next_use(uses: list[int], index: int) -> int:
    """The first of these ascending indices after `index`; a very large number if there is none."""
    place = bisect.bisect_right(uses, index)
    return uses[place] if place < len(uses) else sys.maxsize


def _position(stream: Stream, gather: Gather, prefetch: int) -> int:
    """Where a gather goes: at the start of the stream unless it has to wait for room."""
    if gather.evicted < 0:
        return 0
    earliest, compute_actions = gather.evicted + 1, 0
    for index in range(gather.first - 1, earliest - 1, -1):
        compute_actions += stream[index].parts[0].op in COMPUTE
        if compute_actions == prefetch:
            return index
    return earliest if prefetch else gather.first


def _stages_read(action: Action) -> set[int]:
    return {part.stage for part in action.parts if part.op in READERS}


def _check_room(program: Program, max_gathered: int) -> None:
    for rank, held in enumerate(program.placement):
        where = f"rank {rank} of schedule {program.name}"
        if any(len(program.holders(stage)) > 1 for stage in held):
            least, why = len(held), f"{where} gathers that many stages together with their mirrors"
        else:
            least = max(len(_stages_read(action)) for action in program.streams[rank])
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


def gradient_slots(program: Program, rank: int) -> tuple[BufferSlots, dict[Key, Key]]:
    """The gradient buffer of each (stage, 0) on a rank, which is its own from its first W to its last REDUCE_SCATTER;
    and, by the key of that W, the REDUCE_SCATTER that it has to wait for.

    A stage takes over a buffer only when another one is free too: the last REDUCE_SCATTER then runs beside its W. A
    DualPipe stage keeps its buffer, because waiting for it could block its mirror.
    """
    sharded, free = sharded_stages(program, rank), list[Key]()
    slots, waits = BufferSlots(), dict[Key, Key]()
    for part in instructions_of(program.streams[rank]):
        if part.op in (Op.W, Op.BW) and part.stage in sharded and (part.stage, 0) not in slots:
            if len(free) > 1:
                waits[part.key] = free.pop(0)
                slots[part.stage, 0] = slots[waits[part.key].stage, 0]
            else:
                slots[part.stage, 0] = len(set(slots.values()))
        elif part.op is Op.REDUCE_SCATTER and part.microbatch < 1 and len(program.holders(part.stage)) == 1:
            free.append(part.key)  # its last bucket to be reduced
    return slots, waits


def sharded_stages(program: Program, rank: int) -> set[int]:
    """Stages of which a rank holds a ZeRO shard."""
    return {part.stage for part in instructions_of(program.streams[rank]) if part.op is Op.REDUCE_SCATTER}


def add_gradient_buffer_waits(program: Program) -> Program:
    """The waits of `gradient_slots`."""
    ranks = range(program.ranks)
    return insert(program, (), [(rank, *wait) for rank in ranks for wait in gradient_slots(program, rank)[1].items()])
