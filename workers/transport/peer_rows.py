"""Exchanges of rows inside layers, between the GPUs of one host by copy engines.

A rank writes what it shares into a slot that its peers have mapped, and they read what they need from it beside
compute: no SM waits or copies. All ranks exchange in the same order. A flag for each slot and peer is TAKEN, SHARED and
READ in turn, and a slot is written again once all peers have read it. Slots and flag values depend only on an
exchange's number in the step, so a CUDA graph of a part of a step can be launched in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from pentad.schedules.spec.mesh import LAYER_AXES, Axis
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.row_slots import ROW_SLOTS, row_slot_elements
from pentad.workers.parallel.async_ops import Arrival
from pentad.workers.transport.copy_lane import Lane
from pentad.workers.transport.peer_collectives import Memory
from pentad.workers.transport.stream_flags import FlagWait, FlagWrite

TAKEN, SHARED, READ = 0, 1, 2  # values of a flag; a released one has every bit, which ends all waits
MOST_VIEWS = 256  # of slots, kept for reuse: a model has few shapes, but uneven sequences any number


Steps = list[FlagWrite | FlagWait]


class FlagBatches(Protocol):
    """Flags shared by all ranks, which a stream waits for and writes several at a time. A `stream` of None is the
    current one."""

    def batch(self, steps: Sequence[FlagWrite | FlagWait]) -> Any: ...

    def run(self, batch: Any, stream: Any = None) -> None: ...


class PeerRows:
    """Exchanges of one rank with the others along an axis: `gather`, or `slot` followed by `read` or `scatter`. All
    ranks take part in each."""

    def __init__(
        self, axis: Axis, ranks: Sequence[int], rank: int, flags: FlagBatches, memory: Memory, slots: Tensor, lane: Lane
    ) -> None:
        """`ranks` of the mesh have coordinates 0, 1, ... on the axis; the other ranks have mapped this one's `slots`
        [count, bytes] under the name of the axis."""
        self.axis, self.ranks, self.rank, self.flags, self.memory = axis, ranks, rank, flags, memory
        self.slots, self.lane = slots, lane
        self.index, self.peers = ranks.index(rank), [peer for peer in ranks if peer != rank]
        self.number = 0  # of the latest exchange, modulo the slots
        self.views = dict[Any, Tensor]()  # of the slots
        self.batches = dict[Any, list[Any]]()  # of flags, by purpose

    def begin_step(self) -> None:
        """Restarts the order of slots, so that it is the same in every step."""
        self.number = 0

    def fits(self, elements: int, like: Tensor) -> bool:
        return elements * like.element_size() <= self.slots.shape[1]

    def gather(self, own: Tensor, full: Tensor, *, keep: bool) -> Arrival:
        """Fills full [ranks, ...] with the `own` of every rank, both contiguous; with this rank's only if `keep`.

        The current stream writes the slot: copies within a GPU take SMs, and on the lane they would wait for the last
        tiles of the product that is to run beside the exchange.
        """
        self.slot(own.shape, own).copy_(own)
        if keep:
            full[self.index].copy_(own)
        return self.read([(index, 0, full[index]) for index in range(len(self.ranks)) if index != self.index])

    def slot(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The slot into which the current stream writes what this rank shares next, once peers have read its old
        content."""
        self.number = (self.number + 1) % len(self.slots)
        self.flags.run(self._batches(self._taken)[0])
        key = self.number, tuple(shape), like.dtype
        if key not in self.views:  # making one takes as long as a copy
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            size = like.element_size() * math.prod(shape)
            self.views[key] = self.slots[key[0], :size].view(like.dtype).view(key[1])
        return self.views[key]

    def read(self, parts: Sequence[tuple[int, int, Tensor]], readers: Sequence[int] | None = None) -> Arrival:
        """Fills the contiguous tensor of each (coordinate, start, tensor) with the elements from `start` on of that
        rank's slot. `readers` are the coordinates of those that read this rank's slot; None: all others."""
        self.lane.follow()
        return self._read_each(parts, None if readers is None else tuple(readers), are_told=False)

    def scatter(self, parts: Sequence[tuple[int, int, Tensor]], write: Callable[[int], object]) -> Arrival:
        """Like `read`, but `write(coordinate)` writes one rank's part of the slot at a time, on the current stream.
        Each rank reads its part while the next is being written, possibly before it has written any itself."""
        self.lane.follow()  # the tensors to fill are free by now
        for step in range(1, len(self.ranks)):
            reader = (self.index + step) % len(self.ranks)
            write(reader)
            self.flags.run(self._batches(self._told, reader)[0])
        return self._read_each(parts, None, are_told=True)

    def _read_each(
        self, parts: Sequence[tuple[int, int, Tensor]], readers: tuple[int, ...] | None, *, are_told: bool
    ) -> Arrival:
        """Reads on the lane, from each rank once that rank has announced its part; first announces this rank's slot to
        `readers`, unless that has been done."""
        stream, base = self.lane.handle, self.number * self.slots.shape[1]
        # No two ranks read from the same one at the same time: each begins with the rank before it, which in a
        # `scatter` writes this rank's part first.
        parts = sorted(parts, key=lambda part: (self.index - part[0]) % len(self.ranks))
        before, *after = self._batches(self._read, tuple(index for index, *_ in parts), readers, are_told)
        self.flags.run(before, stream)
        for (index, start, target), flags in zip(parts, after, strict=True):
            first = base // target.element_size() + start
            self.memory.read(self.ranks[index], self.axis, first, target, stream)
            self.flags.run(flags, stream)
        return self.lane.end()

    def _batches(self, steps: Callable[..., list[Steps]], *arguments: Any) -> list[Any]:
        """The flag batches of the latest exchange's slot, cached because making them takes longer than running them."""
        key = self.number, steps.__name__, *arguments
        if key not in self.batches:
            self.batches[key] = [self.flags.batch(each) for each in steps(*arguments)]
        return self.batches[key]

    def _taken(self) -> list[Steps]:
        own = [self._flag(self.rank, peer) for peer in self.peers]
        return [[each for flag in own for each in (FlagWait(flag, READ), FlagWrite(flag, TAKEN))]]

    def _told(self, reader: int) -> list[Steps]:
        return [[FlagWrite(self._flag(self.rank, self.ranks[reader]), SHARED)]]

    def _read(self, order: tuple[int, ...], readers: tuple[int, ...] | None, are_told: bool) -> list[Steps]:
        """The steps before the first copy, between copies, and after the last."""
        shared: Steps = [
            FlagWrite(self._flag(self.rank, peer), SHARED if readers is None or index in readers else READ)
            for index, peer in enumerate(self.ranks)
            if peer != self.rank and not are_told
        ]
        theirs = [self._flag(self.ranks[index], self.rank) for index in order]
        waits: list[Steps] = [[FlagWait(flag, SHARED)] for flag in theirs]
        reads: list[Steps] = [[FlagWrite(flag, READ)] for flag in theirs]
        return [done + wait for done, wait in zip([shared, *reads], [*waits, []], strict=True)]

    def _flag(self, writer: int, reader: int) -> Hashable:
        """The flag of the latest exchange's slot."""
        return self.axis, self.number, writer, reader

    def close(self) -> None:
        """Call after this rank's last copy is done."""
        self.memory.close()


def axes_of(plan: Plan) -> list[Axis]:
    """The axes along which ranks exchange rows."""
    return [axis for axis in LAYER_AXES if row_slot_elements(plan, axis)]


def flags_of(plan: Plan, ranks: Sequence[int]) -> dict[Hashable, int]:
    """The flags of a host's ranks with their initial values, in the same order on each: one for each slot of a rank and
    each rank that may read it."""
    pairs = [
        (axis, rank, peer)
        for axis in axes_of(plan)
        for rank in ranks
        for peer in plan.mesh.group((axis,), rank)
        if peer != rank
    ]
    return {(axis, slot, *pair): READ for axis, *pair in pairs for slot in range(ROW_SLOTS[axis])}
