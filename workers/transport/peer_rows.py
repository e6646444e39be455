"""Rows that tensor ranks exchange inside their layers, between the GPUs of one host by copy engines.

A rank writes what it shares into a slot that its peers have mapped, and they read from it what they need beside
compute: no SM waits or copies. All exchange in the same order, and two counters a rank say up to which exchange it has
shared and read; a slot is written again once all peers have read it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pentad.schedules.spec.plan import ROW_SLOTS, Plan
from pentad.workers.parallel.async_ops import Arrival
from pentad.workers.transport.peer_collectives import Flags, Memory
from pentad.workers.transport.stream_flags import check_driver, handle_of

SHARED_NAME = "rows"
EVENTS = 64  # far more than exchanges are in flight
MOST_VIEWS = 256  # of slots that are kept: a model has few shapes, uneven sequences any number


class Lane(Protocol):
    """A stream beside compute, known as `handle` to flags and memory."""

    handle: Any

    def follow(self) -> None:
        """Makes the lane wait for what the current stream has been given so far."""
        ...

    def end(self) -> Arrival:
        """Everything that the lane has been given so far."""
        ...


class PeerRows:
    """Exchanges of one rank with the other tensor ranks: `gather`, or `slot` and then `read`."""

    def __init__(
        self, ranks: Sequence[int], rank: int, flags: Flags, memory: Memory, slots: Tensor, lane: Lane
    ) -> None:
        """`ranks` of the mesh have tensor ranks 0, 1, ...; `slots` [ROW_SLOTS, bytes] is what they have mapped of this
        one."""
        self.ranks, self.rank, self.flags, self.memory, self.slots, self.lane = ranks, rank, flags, memory, slots, lane
        self.index = ranks.index(rank)
        self.count = 0  # of the exchanges so far
        self.views = dict[Any, Tensor]()  # of the slots

    def fits(self, elements: int, like: Tensor) -> bool:
        return elements * like.element_size() <= self.slots.shape[1]

    def gather(self, own: Tensor, full: Tensor, *, keep: bool) -> Arrival:
        """Fills full [tp, ...] with every rank's `own`, both contiguous; with this rank's if it is to `keep` that too.

        The slot is written by the current stream: copies within a GPU take SMs, and on the lane would wait for the last
        tiles of the product that is to run beside the exchange.
        """
        self.slot(own.shape, own).copy_(own)
        if keep:
            full[self.index].copy_(own)
        return self.read([(index, 0, full[index]) for index in range(len(self.ranks)) if index != self.index])

    def slot(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Where the current stream writes what this rank shares next, once the peers have read what was there."""
        self.count += 1
        if self.count > ROW_SLOTS:
            for peer in self.ranks:
                if peer != self.rank:
                    self.flags.wait(("rows read", peer), self.count - ROW_SLOTS)
        key = self.count % ROW_SLOTS, tuple(shape), like.dtype
        if key not in self.views:  # making one takes as long as a copy
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            size = like.element_size() * math.prod(shape)
            self.views[key] = self.slots[key[0], :size].view(like.dtype).view(key[1])
        return self.views[key]

    def read(self, parts: Sequence[tuple[int, int, Tensor]]) -> Arrival:
        """Fills each contiguous tensor of (tensor rank, start, tensor) with the elements from `start` of that rank's
        slot."""
        self.lane.follow()
        stream, base = self.lane.handle, self.count % ROW_SLOTS * self.slots.shape[1]
        self.flags.write(("rows shared", self.rank), self.count, stream)
        for index, start, target in parts:
            peer = self.ranks[index]
            self.flags.wait(("rows shared", peer), self.count, stream)
            self.memory.read(peer, SHARED_NAME, base // target.element_size() + start, target, stream)
        self.flags.write(("rows read", self.rank), self.count, stream)
        return self.lane.end()

    def close(self) -> None:
        """Call after this rank's last copy is done."""
        self.memory.close()


class CudaLane:
    """The lane of a stream. Its events are used again and again: long before, someone has waited for them. They are the
    driver's own, which take streams by their handles."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import driver

        self.driver, self.stream, self.handle = driver, stream, int(stream.cuda_stream)
        self.events = cycle([self._new_event() for _ in range(EVENTS)])

    def follow(self) -> None:
        event = next(self.events)
        check_driver(self.driver.cuEventRecord(event, handle_of(None)))
        check_driver(self.driver.cuStreamWaitEvent(self.handle, event, 0))

    def end(self) -> Arrival:
        event = next(self.events)
        check_driver(self.driver.cuEventRecord(event, self.handle))
        return _LaneEnd(self.driver, event)

    def _new_event(self) -> Any:
        result = self.driver.cuEventCreate(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        check_driver(result)
        return result[1]


class _LaneEnd(NamedTuple):
    driver: Any
    event: Any

    def wait(self) -> None:
        check_driver(self.driver.cuStreamWaitEvent(handle_of(None), self.event, 0))


def flag_names(plan: Plan) -> list[Hashable]:
    """The flags of all ranks of a plan, in the same order on each."""
    ranks = range(plan.mesh.size if plan.row_slot_elements else 0)
    return [(event, rank) for event in ("rows shared", "rows read") for rank in ranks]
