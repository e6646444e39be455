"""Pass: activations whose backward is far away are offloaded to host memory and reloaded in time (OFFLOAD, RELOAD).

When a rank would save more than it may, it offloads the activation whose backward comes last (Belady 1966). A reload
goes some compute actions before that backward, if there is room by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, Wait, insert
from pentad.schedules.simulate.memory import SAVED_CHANGE

_Cell = tuple[int, int]  # stage, microbatch


class _RoundTrip(NamedTuple):
    """An activation on the host: indices of the actions before which it is offloaded and reloaded."""

    cell: _Cell
    offload: int
    reload: int


def add_offload(program: Program, max_resident: float, prefetch: int = 2) -> Program:
    """OFFLOAD and RELOAD so that no rank has more than `max_resident` activations, in microbatches of a whole rank, on
    its device at once.

    RELOAD goes `prefetch` compute actions before the backward, or later if there is no room. Activations that are
    recomputed are not offloaded. Raises PentadError when a rank needs more at one moment.
    """
    offloads: list[Addition] = []
    reloads: list[Addition] = []
    waits: list[Wait] = []
    chunks = program.chunks * program.slices  # activations in one microbatch of a whole rank
    for rank, stream in enumerate(program.streams):
        backward = {(p.stage, p.microbatch): p.key for p in instructions_of(stream) if p.op in (Op.B, Op.BW)}
        residency = _Residency(stream, max_resident * chunks, prefetch)
        for cell, offload, reload in residency.round_trips():
            offload_key, reload_key = Key(Op.OFFLOAD, *cell), Key(Op.RELOAD, *cell)
            offloads.append((rank, offload, Instruction(*offload_key, waits=(Key(Op.F, *cell),))))
            reloads.append((rank, reload, Instruction(*reload_key, waits=(offload_key,))))
            waits.append((rank, backward[cell], reload_key))
        if residency.shortage:
            expected = f"at least {residency.shortage / chunks:g}, which rank {rank} saves at once"
            raise PentadError(f"memory.max_resident_microbatches is {max_resident:g}: expected {expected}")
    return insert(program, offloads + reloads, waits)  # at one position in this order


class _Residency:
    """Walks through a rank's stream and tracks which activations are on the device. Amounts are in activations of one
    chunk; `shortage` is how many the rank needs at once if that is more than `limit`."""

    def __init__(self, stream: Stream, limit: float, prefetch: int) -> None:
        self.stream, self.limit = stream, limit
        parts = [(index, part) for index, action in enumerate(stream) for part in action.parts]
        self.recompute = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.RECOMPUTE}
        self.recomputed_stages = {stage for stage, _ in self.recompute}
        self.backward = {(p.stage, p.microbatch): index for index, p in parts if p.op in (Op.B, Op.BW)}
        self.compute = [index for index, action in enumerate(stream) if action.parts[0].op in COMPUTE]
        self.reload_from = {index: self.compute[max(0, at - prefetch)] for at, index in enumerate(self.compute)}
        self.offloadable: set[_Cell] = set()  # on the device since their F
        self.on_host: dict[_Cell, int] = {}  # with the index of the action before which they were offloaded
        self.resident = self.shortage = 0.0

    def round_trips(self) -> Iterator[_RoundTrip]:
        for index in self.compute:
            due = [cell for cell in self.on_host if self.reload_from[self.backward[cell]] <= index]
            for cell in sorted(due, key=self.backward.__getitem__):
                if self.resident + 1 <= self.limit or self.backward[cell] == index:
                    self._make_room(index)
                    yield _RoundTrip(cell, self.on_host.pop(cell), index)
                    self.resident += 1  # and is not offloaded again
            for part in self.stream[index].parts:
                self._run(part, index)

    def _run(self, part: Instruction, index: int) -> None:
        cell = (part.stage, part.microbatch)
        is_recomputed = part.stage in self.recomputed_stages
        if part.op is Op.F and not is_recomputed:
            self._make_room(index)
            self.offloadable.add(cell)
            self.resident += 1
        elif part.op in (Op.B, Op.BW):
            if is_recomputed:
                self._make_room(index, self.recompute[cell])
                self.resident += 1
            self.offloadable.discard(cell)
            self.resident += SAVED_CHANGE[part.op]
        elif part.op is Op.W:
            self.resident += SAVED_CHANGE[part.op]

    def _make_room(self, index: int, before: int | None = None) -> None:
        """Offloads until one more activation fits for action `index`, before that action or an earlier one (`before`),
        but nothing that the action itself uses."""
        used = {(part.stage, part.microbatch) for part in self.stream[index].parts}
        while self.resident + 1 > self.limit + 1e-9:
            if not self.offloadable - used:
                self.shortage = max(self.shortage, self.resident + 1)
                return
            farthest = max(self.offloadable - used, key=self.backward.__getitem__)
            self.offloadable.remove(farthest)
            self.on_host[farthest] = index if before is None else before
            self.resident -= 1
