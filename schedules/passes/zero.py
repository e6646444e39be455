"""Pass of ZeRO (arXiv 1910.02054, section 5): when a rank gathers a stage's parameters from its holders' shards.

Stages 1 and 2: once a step, since every holder has stepped on its own shard. Stage 3: a rank keeps the parameters of
some stages only, and gathers one anew for the next unit that reads it, where it frees what it needs last (Belady 1966).
A rank that may keep all its stages gathers each once a step, whatever the number of microbatches.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, Unit
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, insert

READERS = frozenset({Op.F, Op.B, Op.BW, Op.RECOMPUTE})  # of parameters; W reads what B left


class Gather(NamedTuple):
    """The `turn`-th time that a rank holds a stage: read from unit `first` to unit `last` of its stream. `freed` is the
    last reader of what had its place before, -1 where that is nothing."""

    stage: int
    turn: int
    first: int
    last: int
    freed: int = -1


def add_gathers(program: Program, *, zero: int, prefetch: int = 1, gathered: int | None = None) -> Program:
    """ALL_GATHER of every stage before it is read, the k-th of a stage with microbatch k, and with `zero` 3 a FREE of
    the same number behind its last reader. At most `gathered` stages are whole on a rank at once, those on their way
    included (None: all it holds); a gather begins `prefetch` compute units before its reader, later without room.

    Raises PentadError when that is too few for a unit of the program, or for mirrors, which gather together.
    """
    added: list[Addition] = []
    waits: dict[tuple[int, Key], list[Key]] = {}
    if zero == 3 and gathered is not None:
        require_room(program, gathered)
    for rank, stream in enumerate(program.streams):
        room = len(program.placement[rank]) if gathered is None or zero < 3 else gathered
        found = sorted(_gathers(stream, room), key=lambda each: each.stage)
        frees = sorted((gather.last + 1, Key(Op.FREE, gather.stage, gather.turn)) for gather in found)
        for gather in found:
            key = Key(Op.ALL_GATHER, gather.stage, gather.turn)
            begins = _begins(stream, gather, prefetch)
            free = bisect.bisect_right(frees, begins, key=lambda each: each[0])
            after = (frees[free - 1][1],) if gather.freed >= 0 else ()
            added.append((rank, begins, Instruction(*key, group=f"stage{gather.stage}", waits=after)))
            reader = next(part.key for part in stream[gather.first].parts if part.stage == gather.stage)
            waits.setdefault((rank, reader), []).append(key)
            if zero == 3:
                added.append((rank, gather.last + 1, Instruction(Op.FREE, gather.stage, gather.turn)))
    return insert(program, sorted(added, key=lambda each: (each[1], each[2].op is not Op.FREE)), waits)


def _gathers(stream: Stream, room: int) -> list[Gather]:
    uses: dict[int, list[int]] = {}
    for index, unit in enumerate(stream):
        for stage in _read(unit):
            uses.setdefault(stage, []).append(index)
    here: dict[int, Gather] = {}
    turns: Counter[int] = Counter()
    found = []
    for index, unit in enumerate(stream):
        expected = _read(unit)
        for stage in sorted(expected - here.keys()):
            freed = -1
            if len(here) == room:
                gone = max(here.keys() - expected, key=lambda each: (_next_use(uses[each], index), each))
                found.append(here[gone])
                freed = here.pop(gone).last
            here[stage] = Gather(stage, turns[stage], index, index, freed)
            turns[stage] += 1
        for stage in expected:
            here[stage] = here[stage]._replace(last=index)
    return found + list(here.values())


def _next_use(uses: list[int], index: int) -> int:
    """The first of these (ascending) behind an index; beyond all when there is none."""
    place = bisect.bisect_right(uses, index)
    return uses[place] if place < len(uses) else sys.maxsize


def _begins(stream: Stream, gather: Gather, prefetch: int) -> int:
    """Where a gather is to stand: first of all when its place was never taken."""
    if gather.freed < 0:
        return 0
    earliest, ahead = gather.freed + 1, 0
    for index in range(gather.first - 1, earliest - 1, -1):
        ahead += stream[index].parts[0].op in COMPUTE
        if ahead == prefetch:
            return index
    return earliest if prefetch else gather.first


def _read(unit: Unit) -> set[int]:
    return {part.stage for part in unit.parts if part.op in READERS}


def require_room(program: Program, gathered: int) -> None:
    """Raises PentadError where so few stages' parameters at once are too few for a rank."""
    for rank in range(program.ranks):
        _require(program, rank, gathered)


def _require(program: Program, rank: int, room: int) -> None:
    held = program.placement[rank]
    most = max(len(_read(unit)) for unit in program.streams[rank])
    if room < most:
        raise PentadError(f"gathered is {room}, but rank {rank} reads {most} stages in one unit")
    if room < len(held) and any(len(program.holders(stage)) > 1 for stage in held):
        raise PentadError(
            f"gathered is {room}, but mirrors gather together: rank {rank} of schedule {program.name} holds {len(held)}"
        )
