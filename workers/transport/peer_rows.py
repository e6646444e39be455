"""Rows that tensor ranks exchange inside their layers, between the GPUs of one host by copy engines.

A rank writes what it shares into a slot that its peers have mapped, and they read from it what they need beside
compute: no SM waits or copies. All exchange in the same order, and two counters a rank say up to which exchange it has
shared and read; a slot is written again once all peers have read it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pentad.schedules.spec.plan import ROW_SLOTS, Plan
from pentad.workers.parallel.async_ops import Arrival
from pentad.workers.transport.peer_collectives import Flags, Memory

SHARED_NAME = "rows"


class Lane(Protocol):
    """A stream beside compute."""

    def after_current(self) -> AbstractContextManager[object]:
        """What is issued within runs on the lane, after what the current stream has been given so far."""
        ...

    def end(self) -> Arrival:
        """Everything that the lane has been given so far."""
        ...


class PeerRows:
    """Exchanges of one rank with the other tensor ranks, each `slot` and then `read`."""

    def __init__(
        self, ranks: Sequence[int], rank: int, flags: Flags, memory: Memory, slots: Tensor, lane: Lane
    ) -> None:
        """`ranks` of the mesh have tensor ranks 0, 1, ...; `slots` [ROW_SLOTS, bytes] is what they have mapped of this
        one."""
        self.ranks, self.rank, self.flags, self.memory, self.slots, self.lane = ranks, rank, flags, memory, slots, lane
        self.peers = [peer for peer in ranks if peer != rank]
        self.count = 0  # of the exchanges so far

    def fits(self, elements: int, like: Tensor) -> bool:
        return elements * like.element_size() <= self.slots.shape[1]

    def slot(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Where the current stream writes what this rank shares next, once the peers have read what was there."""
        self.count += 1
        if self.count > ROW_SLOTS:
            for peer in self.peers:
                self.flags.wait(("rows read", peer), self.count - ROW_SLOTS)
        size = like.element_size() * torch.Size(shape).numel()
        return self.slots[self.count % ROW_SLOTS, :size].view(like.dtype).view(shape)

    def read(self, parts: Sequence[tuple[int, int, Tensor]]) -> Arrival:
        """Fills each contiguous tensor of (tensor rank, start, tensor) with the elements from `start` of that rank's
        slot of this exchange."""
        with self.lane.after_current():
            self.flags.write(("rows shared", self.rank), self.count)
            for index, start, target in parts:
                peer, slot = self.ranks[index], self.count % ROW_SLOTS * self.slots.shape[1] // target.element_size()
                self.flags.wait(("rows shared", peer), self.count)
                self.memory.read(peer, SHARED_NAME, slot + start, target)
            self.flags.write(("rows read", self.rank), self.count)
            return self.lane.end()

    def close(self) -> None:
        """Call after this rank's last copy is done."""
        self.memory.close()


class CudaLane:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        self.stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.stream):
            yield

    def end(self) -> Arrival:
        return self.stream.record_event()


def flag_names(plan: Plan) -> list[Hashable]:
    """The flags of all ranks of a plan, in the same order on each."""
    ranks = range(plan.mesh.size if plan.row_slot_elements else 0)
    return [(event, rank) for event in ("rows shared", "rows read") for rank in ranks]
