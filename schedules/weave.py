"""How passes say what they add: instructions with the place they stand at, and further waits of those there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pentad.schedules.instruction import Instruction, Key, Overlap, Unit
from pentad.schedules.program import Program

Addition = tuple[int, int, Instruction]  # rank, index of the unit that it stands before, instruction
Waits = Mapping[tuple[int, Key], Sequence[Key]]


def insert(program: Program, additions: Iterable[Addition], waits: Waits | None = None) -> Program:
    """The program with these instructions in it: those of one place in the order given; an index behind the last unit
    is the end. `waits` are more keys that an instruction of a rank, by its own key, is to wait for."""
    wanted: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    for rank, index, part in additions:
        wanted[rank, index].append(part)
    more = waits or {}

    def with_waits(rank: int, part: Instruction) -> Instruction:
        return part._replace(waits=tuple(dict.fromkeys((*part.waits, *more.get((rank, part.key), ())))))

    streams = []
    for rank, stream in enumerate(program.streams):
        woven: list[Unit] = []
        for index, unit in enumerate(stream):
            woven += wanted.get((rank, index), ())
            parts = [with_waits(rank, part) for part in unit.parts]
            woven.append(Overlap(*parts) if len(parts) == 2 else parts[0])
        woven += wanted.get((rank, len(stream)), ())
        streams.append(tuple(woven))
    return program.with_streams(tuple(streams))
