"""Pass: activations are copied to host memory after their forward and come back for their backward (OFFLOAD, RELOAD).

OFFLOAD follows the forward at once. Its copy runs beside later compute, and some later compute instruction takes over
the memory, for which it waits for the copy. Both OFFLOAD, for what stays of a tensor that is cut, and RELOAD may get
memory that compute has used until then, and wait for that.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, Wait, insert
from pentad.schedules.simulate.memory import SAVED_CHANGE

BUFFERS = 2  # units that may be on the device: one is copied to the host, the next one computes
PREFETCH = 1  # compute actions between the start of a reload and its use
EARLIEST = 2  # the same, where only memory limits it
_ON_COMPUTE_LANE = COMPUTE | {Op.RECOMPUTE}
_Cell = tuple[int, int]  # stage, microbatch


class _RoundTrip(NamedTuple):
    """An activation on the host: indices of the actions that take over its memory, and before which it comes back."""

    cell: _Cell
    release: int
    reload: int


def add_offload(program: Program, stages: Collection[int]) -> Program:
    """OFFLOAD and RELOAD of every microbatch of these stages, but where the backward follows so soon after the forward
    that a copy would free no memory in time.

    At most BUFFERS - 1 compute actions of these stages run beside an OFFLOAD, and the next one waits for it; a RELOAD
    starts PREFETCH of them before the backward. Raises PentadError for a stage that the program does not have.
    """
    trips = [list(_trips_of(_Walk(stream), stages)) for stream in program.streams]
    return _insert(program, trips)


def add_offload_beyond(program: Program, max_resident: float) -> Program:
    """OFFLOAD and RELOAD so that no rank has more than `max_resident` activations, in microbatches of a whole rank, on
    its device at once: what is offloaded is the activation whose backward comes last (Belady 1966).

    RELOAD goes EARLIEST compute actions before the backward, or later if there is no room. Activations that are
    recomputed are not offloaded. Raises PentadError when a rank needs more at one moment.
    """
    found: list[list[_RoundTrip]] = []
    chunks = program.chunks * program.slices  # activations in one microbatch of a whole rank
    for rank, stream in enumerate(program.streams):
        residency = _Residency(_Walk(stream), max_resident * chunks)
        found.append(list(residency.round_trips()))
        if residency.shortage:
            expected = f"at least {residency.shortage / chunks:g}, which rank {rank} saves at once"
            raise PentadError(f"memory.max_resident_microbatches is {max_resident:g}: expected {expected}")
    return _insert(program, found)


class _Walk:
    """A rank's stream, with the indices of its compute actions, and of each cell's forward, recomputation and
    backward."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        parts = [(index, part) for index, action in enumerate(stream) for part in action.parts]
        self.forward = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.F}
        self.recompute = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.RECOMPUTE}
        self.backward = {(p.stage, p.microbatch): index for index, p in parts if p.op in (Op.B, Op.BW)}
        self.compute = [index for index, action in enumerate(stream) if action.parts[0].op in COMPUTE]
        self.number = {index: number for number, index in enumerate(self.compute)}  # among compute actions

    def reader_of_result(self, cell: _Cell) -> int:
        """The forward on this rank, or -1, that reads the result of a forward: this may be part of what that saves."""
        stage, microbatch = cell
        return self.forward.get((stage + 1, microbatch), -1)

    def begins(self, index: int) -> int:
        """Where a compute action begins: a backward at its recomputation, if it has one."""
        parts = [part for part in self.stream[index].parts if part.op in (Op.B, Op.BW)]
        return min((self.recompute.get((part.stage, part.microbatch), index) for part in parts), default=index)

    def first_part(self, index: int) -> Key:
        return self.stream[self.begins(index)].parts[0].key

    def last_parts(self, before: int) -> tuple[Key, ...]:
        """The last on the compute lane before an index."""
        for index in range(before - 1, -1, -1):
            action = self.stream[index]
            if action.parts[0].op in _ON_COMPUTE_LANE:
                return tuple(part.key for part in action.parts)
        raise AssertionError("no forward comes before a reload")


def _trips_of(walk: _Walk, stages: Collection[int]) -> Iterator[_RoundTrip]:
    # Others, such as an embedding, may take no time beside which anything could be copied.
    compute = [index for index in walk.compute if any(part.stage in stages for part in walk.stream[index].parts)]
    number = {index: number for number, index in enumerate(compute)}
    for cell, forward in walk.forward.items():
        if cell[0] in stages:
            reader = bisect.bisect_right(compute, walk.reader_of_result(cell))
            release, reload = max(number[forward] + BUFFERS, reader), number[walk.backward[cell]] - PREFETCH
            if release < reload:
                yield _RoundTrip(cell, compute[release], compute[reload])


def _insert(program: Program, trips: Iterable[Iterable[_RoundTrip]]) -> Program:
    offloads: list[Addition] = []
    reloads: list[Addition] = []
    waits: list[Wait] = []
    for rank, (stream, found) in enumerate(zip(program.streams, trips, strict=True)):
        walk = _Walk(stream)
        for cell, release, reload in sorted(found, key=lambda trip: walk.backward[trip.cell]):
            offload_key, reload_key = Key(Op.OFFLOAD, *cell), Key(Op.RELOAD, *cell)
            forward, position = walk.forward[cell], walk.begins(reload)
            parts = (part.key for part in stream[forward].parts)
            offloads.append((rank, forward + 1, Instruction(*offload_key, waits=(*parts,))))
            after = (offload_key, *walk.last_parts(position))
            reloads.append((rank, position, Instruction(*reload_key, waits=after)))
            reader = walk.recompute.get(cell, walk.backward[cell])
            keys = (part.key for part in walk.stream[reader].parts if (part.stage, part.microbatch) == cell)
            waits += [(rank, walk.first_part(release), offload_key), *((rank, key, reload_key) for key in keys)]
    return insert(program, offloads + reloads, waits)  # at one position in this order


class _Residency:
    """Walks through a rank's stream and tracks which activations are on the device. Amounts are in activations of one
    chunk; `shortage` is how many the rank needs at once if that is more than `limit`."""

    def __init__(self, walk: _Walk, limit: float) -> None:
        self.walk, self.limit = walk, limit
        self.recomputed_stages = {stage for stage, _ in walk.recompute}
        self.reload_from = {index: walk.compute[max(0, at - EARLIEST)] for at, index in enumerate(walk.compute)}
        self.offloadable: set[_Cell] = set()  # on the device since their F
        self.on_host: dict[_Cell, int] = {}  # with the index of the action that has taken over their memory
        self.resident = self.shortage = 0.0

    def round_trips(self) -> Iterator[_RoundTrip]:
        backward = self.walk.backward
        for index in self.walk.compute:
            due = [cell for cell in self.on_host if self.reload_from[backward[cell]] <= index]
            for cell in sorted(due, key=backward.__getitem__):
                if self.resident + 1 <= self.limit or backward[cell] == index:
                    self._make_room(index, self._before(index))
                    yield _RoundTrip(cell, self.on_host.pop(cell), index)
                    self.resident += 1  # and is not offloaded again
            for part in self.walk.stream[index].parts:
                self._run(part, index)

    def _before(self, index: int) -> int:
        """The compute action before this one: a reload waits for it, and so for what it waits for."""
        return self.walk.compute[max(0, self.walk.number[index] - 1)]

    def _run(self, part: Instruction, index: int) -> None:
        cell = (part.stage, part.microbatch)
        is_recomputed = part.stage in self.recomputed_stages
        if part.op is Op.F and not is_recomputed:
            self._make_room(index, index)
            self.offloadable.add(cell)
            self.resident += 1
        elif part.op in (Op.B, Op.BW):
            if is_recomputed:
                self._make_room(index, index)
                self.resident += 1
            self.offloadable.discard(cell)
            self.resident += SAVED_CHANGE[part.op]
        elif part.op is Op.W:
            self.resident += SAVED_CHANGE[part.op]

    def _make_room(self, index: int, release: int) -> None:
        """Offloads until one more activation fits when action `release` begins, but nothing that it or action `index`
        uses."""
        used = {(part.stage, part.microbatch) for at in (index, release) for part in self.walk.stream[at].parts}
        used |= {cell for cell in self.offloadable if self.walk.reader_of_result(cell) >= release}
        while self.resident + 1 > self.limit + 1e-9:
            if not self.offloadable - used:
                self.shortage = max(self.shortage, self.resident + 1)
                return
            farthest = max(self.offloadable - used, key=self.walk.backward.__getitem__)
            self.offloadable.remove(farthest)
            self.on_host[farthest] = release
            self.resident -= 1
