"""Pass: activations that wait longest for their backward go to the host's memory meanwhile: OFFLOAD and RELOAD.

Which ones: when a rank is to keep more than it may, the one whose backward is farthest (Belady 1966). They come back
some compute units before that, when there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, units_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, insert
from pentad.schedules.simulate.memory import SHARE


class Trip(NamedTuple):
    """An activation's way to the host and back: indices of the units before which it goes and returns."""

    stage: int
    microbatch: int
    goes: int
    returns: int


def add_offload(program: Program, keep: float, ahead: int = 2) -> Program:
    """OFFLOAD and RELOAD so that no rank keeps more than `keep` microbatches' activations, of a whole rank, at once.

    RELOAD stands `ahead` compute units before the backward, later where there is no room. What is recomputed stays.
    Raises PentadError when what a rank needs at one moment is more.
    """
    added: list[Addition] = []
    waits: dict[tuple[int, Key], list[Key]] = {}
    for rank, stream in enumerate(program.streams):
        backward = {(p.stage, p.microbatch): p.key for p in units_of(stream) if p.op in (Op.B, Op.BW)}
        share = program.chunks * program.slices  # activations of a chunk that a whole rank's are
        walk = _Walk(stream, keep * share, ahead)
        for trip in walk.trips():
            where = (trip.stage, trip.microbatch)
            go, back = Key(Op.OFFLOAD, *where), Key(Op.RELOAD, *where)
            added.append((rank, trip.goes, Instruction(*go, waits=(Key(Op.F, *where),))))
            added.append((rank, trip.returns, Instruction(*back, waits=(go,))))
            waits[rank, backward[where]] = [back]
        if walk.short:
            text = f"offload keeps {keep:g} activations, but rank {rank} needs {walk.short / share:g} at once"
            raise PentadError(text)
    return insert(program, sorted(added, key=lambda each: (each[1], each[2].op is Op.RELOAD)), waits)


class _Walk:
    """A rank's units in order, and what is on the device meanwhile, in activations of a chunk; `short` is how many are
    needed at once where that is more than `keep`."""

    def __init__(self, stream: Stream, keep: float, ahead: int) -> None:
        self.stream, self.keep = stream, keep
        parts = [(index, part) for index, unit in enumerate(stream) for part in unit.parts]
        self.again = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.RECOMPUTE}
        self.light = {stage for stage, _ in self.again}
        self.backward = {(p.stage, p.microbatch): index for index, p in parts if p.op in (Op.B, Op.BW)}
        self.compute = [index for index, unit in enumerate(stream) if unit.parts[0].op in COMPUTE]
        self.early = {index: self.compute[max(0, at - ahead)] for at, index in enumerate(self.compute)}
        self.here: set[tuple[int, int]] = set()  # on the device, between F and B, and never away
        self.away: dict[tuple[int, int], int] = {}  # since before which unit
        self.held = self.short = 0.0

    def trips(self) -> Iterator[Trip]:
        for index in self.compute:
            due = [each for each in self.away if self.early[self.backward[each]] <= index]
            for each in sorted(due, key=self.backward.__getitem__):
                if self.held + 1 <= self.keep or self.backward[each] == index:
                    self._make_room(1, index)
                    yield Trip(*each, self.away.pop(each), index)
                    self.held += 1  # and stays: not in `here`
            for part in self.stream[index].parts:
                self._run(part, index)

    def _run(self, part: Instruction, index: int) -> None:
        where = (part.stage, part.microbatch)
        light = part.stage in self.light
        if part.op is Op.F and not light:
            self._make_room(1, index)
            self.here.add(where)
            self.held += 1
        elif part.op in (Op.B, Op.BW):
            if light:
                self._make_room(1, index, self.again[where])
                self.held += 1
            self.here.discard(where)
            self.held += SHARE[part.op]
        elif part.op is Op.W:
            self.held += SHARE[part.op]

    def _make_room(self, more: float, index: int, place: int | None = None) -> None:
        """Sends away what is needed last, before a unit (or an earlier place where it is needed), but not what that
        unit itself needs."""
        needed = {(part.stage, part.microbatch) for part in self.stream[index].parts}
        while self.held + more > self.keep + 1e-9:
            if not self.here - needed:
                self.short = max(self.short, self.held + more)
                return
            farthest = max(self.here - needed, key=self.backward.__getitem__)
            self.here.remove(farthest)
            self.away[farthest] = index if place is None else place
            self.held -= 1
