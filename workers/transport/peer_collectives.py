"""ZeRO's collectives between the GPUs of one host by copy engines, which leave the SMs to concurrent kernels.

Every rank reads what it needs from the memory of its peers; flags in host memory say when it may. Weights can be read
from one update to the next, so an ALL_GATHER waits for no other rank's ALL_GATHER. In a REDUCE_SCATTER each holder
announces that its gradients are complete, adds the others' parts of its shard in the order of ranks, and leaves its own
gradients alone until all have read them; while it adds some elements, a lane reads the next. In bfloat16 this happens
chunk by chunk: a holder rounds a chunk into its outbox, where the others read it (the sums are those of
workers/transport/bf16_reduction.py). An update has nothing more to wait for: it needs the sums of its shard, which
include every holder's gradients and so come after every holder's last ALL_GATHER of the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard, Plan
from pentad.schedules.spec.zero_layout import zero_group
from pentad.workers.parallel.async_ops import Arrival
from pentad.workers.transport.bf16_reduction import chunks
from pentad.workers.transport.copy_lane import Lane

OUTBOX = "outbox"  # the name under which ranks share their outboxes


class Flags(Protocol):
    """Counters that only grow, shared by all ranks (workers/transport/stream_flags.py). A `stream` of None is the
    current one."""

    def write(self, flag: Hashable, value: int, stream: Any = None) -> None: ...

    def wait(self, flag: Hashable, value: int, stream: Any = None) -> None: ...


class Memory(Protocol):
    """Tensors of other ranks by name (workers/transport/peer_memory.py)."""

    def read(self, peer: int, name: str, start: int, target: torch.Tensor, stream: Any = None) -> None: ...

    def close(self) -> None: ...


class PeerCollectives:
    """Collectives of one rank; same interface as `GroupCollectives`."""

    def __init__(
        self, plan: Plan, rank: int, flags: Flags, memory: Memory, lane: Lane, inbox: torch.Tensor, outbox: torch.Tensor
    ) -> None:
        """Parts of other ranks arrive in `inbox` [elements], on `lane`. In bfloat16 they are read from the ranks'
        `outbox` [elements] and the inbox is of that dtype; with an empty outbox they are read from the gradients
        themselves, whose dtype the inbox has."""
        self.rank, self.flags, self.memory, self.lane = rank, flags, memory, lane
        self.inbox, self.outbox = inbox, outbox
        self.holders, self.peers = _holders(plan, rank), peers_of(plan, rank)
        self.updates, self.awaited = 0, 0  # of the weights, so far; those that gathers have waited for
        self.sums: Counter[ParamShard] = Counter()  # added so far

    def all_gather(self, shard: ParamShard, full: torch.Tensor, part: torch.Tensor) -> list[Arrival]:
        """Fills `full` [holders part] with the weights of all holders; `part` is all that this rank contributes in its
        dtype."""
        holders = self.holders[shard]
        if self.awaited < self.updates:
            self.awaited = self.updates
            for peer in self.peers:
                self.flags.wait(("updated", peer), self.updates)
        own = holders.index(self.rank)
        for index in range(own, own + len(holders)):  # no two ranks read from the same one at the same time
            index %= len(holders)
            target = full.view(len(holders), -1)[index]
            if index != own:
                self.memory.read(holders[index], weights_name(shard, part.dtype), 0, target)
            elif target.data_ptr() != part.data_ptr():
                target.copy_(part)
        return []

    def reduce_scatter(
        self,
        shard: ParamShard,
        part: torch.Tensor,
        full: torch.Tensor,
        program: int,
        *,
        accumulate: bool,
        first: int,
    ) -> list[Arrival]:
        """Sums the elements of `part` over the holders' gradients and writes the sum to `part` or, with `accumulate`,
        adds it. This rank has `full`, which begins at element `first` of the gradients it shares. `part` may be its
        place in `full`."""
        terms = full.view(len(self.holders[shard]), -1)
        if not self.outbox.numel():
            self._add(shard, part, terms, gradients_name(shard, program), first, accumulate=accumulate)
            return []
        for columns in chunks(part.numel(), self.outbox.numel() // len(terms)):
            sent = terms[:, columns]
            rounded = self.outbox[: sent.numel()].view(sent.shape)
            rounded.copy_(sent)
            self._add(shard, part[columns], rounded, OUTBOX, 0, accumulate=accumulate)
        return []

    def _add(
        self, shard: ParamShard, part: torch.Tensor, terms: torch.Tensor, name: str, first: int, *, accumulate: bool
    ) -> None:
        """Sums the holders' terms [holders, n] for `part` [n]; each holder shares its own under `name`, from element
        `first` on."""
        holders, size = self.holders[shard], part.numel()
        own, others = holders.index(self.rank), [holder for holder in holders if holder != self.rank]
        self.sums[shard] += 1
        self._announce("complete", shard, others)
        halves, arriving = self._halves(len(others)), deque[tuple[slice, torch.Tensor, Arrival]]()

        def add_next() -> None:
            columns, arrived, end = arriving.popleft()
            end.wait()
            add_shards_(part[columns], terms[own, columns], arrived, own, accumulate=accumulate)

        for number, columns in enumerate(chunks(size, halves.shape[2])):
            if number >= len(halves):
                add_next()
            arrived = halves[number % len(halves), :, : columns.stop - columns.start]
            self.lane.follow()
            for index in (*range(own, len(others)), *range(own)):  # the same order as in `all_gather`
                start = first + own * size + columns.start
                self.memory.read(others[index], name, start, arrived[index], self.lane.handle)
            arriving.append((columns, arrived, self.lane.end()))
        while arriving:
            add_next()
        self._announce("read", shard, others)

    def after_update(self) -> None:
        """Announces that the weights are those of the next step."""
        self.updates += 1
        self.flags.write(("updated", self.rank), self.updates)

    def close(self) -> None:
        """Call after this rank's last copy is done."""
        self.memory.close()

    def _halves(self, count: int) -> torch.Tensor:
        """The inbox as [2, count, elements]."""
        size = self.inbox.numel() // (2 * count) // ALIGNMENT * ALIGNMENT
        return self.inbox[: 2 * count * size].view(2, count, size)

    def _announce(self, event: str, shard: ParamShard, others: list[int]) -> None:
        """Announces that this rank has reached `event` in the current sum of the shard, and waits for the other holders
        to."""
        self.flags.write((event, shard, self.rank), self.sums[shard])
        for peer in others:
            self.flags.wait((event, shard, peer), self.sums[shard])


def flag_names(plan: Plan, ranks: Sequence[int]) -> list[Hashable]:
    """The flags of the ranks of a host, in the same order on each."""
    held = ((shard, rank) for shard in plan.param_shards for rank in plan.holders(shard) if rank in ranks)
    return [
        *(("updated", rank) for rank in ranks),
        *((event, *place) for place in held for event in ("complete", "read")),
    ]


def peers_of(plan: Plan, rank: int) -> list[int]:
    """The other ranks among which ZeRO divides a rank's parameters."""
    return sorted({peer for holders in _holders(plan, rank).values() for peer in holders} - {rank})


def weights_name(shard: ParamShard, dtype: torch.dtype) -> str:
    """The name under which ranks share their part of the weights of a shard that are gathered in this dtype."""
    return "-".join(map(str, ("weights", *map(int, shard), str(dtype).removeprefix("torch."))))


def gradients_name(shard: ParamShard, program: int) -> str:
    """The name under which ranks share a shard's full gradients, at their place in a program of the plan."""
    return "-".join(map(str, ("gradients", program, *map(int, shard))))


def _holders(plan: Plan, rank: int) -> dict[ParamShard, tuple[int, ...]]:
    """The ranks among which ZeRO divides a rank's parameters, by shard."""
    held = (*plan.param_shards_of(rank), *plan.frozen_shards_of(rank))
    return {shard: zero_group(plan, shard, rank) for shard in held if plan.num_zero_shards(shard) > 1}
