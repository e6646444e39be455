"""Expert parallelism: token dispatchers, which move tokens to the ranks of their experts and results back.

Experts are divided into contiguous blocks of equal size, one per rank. `dispatch` sends rows [T, ...] of this rank's
tokens to every rank that has an expert for them and returns the rows [T', ...] received; `combine` sends partial
results [T', ...] back and returns their sums [T, ...]. Each is the transpose of the other, so the backward pass uses
the same two. Rows of unused slots belong to no token and no expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.moe.moe_permute import sum_rows
from pentad.schedules.spec.row_slots import GROWTH
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork, Task, ready
from pentad.workers.parallel.row_exchange import RowGroup
from pentad.workers.rank_waits import rank_waits

DispatchMode = Literal["all_to_all", "all_gather"]
ROUTING_DTYPES = torch.int32, torch.int64  # of `pack_routing`; -1 is no expert


class ExpertSlots:
    """Room for `tokens` tokens from one rank to another at a time. Tokens in excess are left out and counted in
    `overflows`, a float64 scalar on the device: the step is then rejected and run again with more room."""

    def __init__(self, tokens: int, device: str) -> None:
        self.tokens, self.overflows = tokens, torch.zeros((), dtype=torch.float64, device=device)

    def sufficed(self, world: dist.ProcessGroup | None, check: Callable[[], None]) -> bool:
        """Whether all tokens of all ranks have found a slot. Waits for all ranks, then calls `check`."""
        total = self.overflows.clone()
        if world is not None:
            with rank_waits.abandonable():
                dist.all_reduce(total, group=world)
        found = total.item()  # on a GPU the host waits here
        check()
        return not found

    def agree(self, known: int, world: dist.ProcessGroup | None) -> None:
        """Takes at least as many slots as any rank had (`known`) in an earlier generation."""
        largest = torch.tensor(max(known, self.tokens), device=self.overflows.device)
        if world is not None:
            with rank_waits.abandonable():
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=world)
        self.tokens = int(largest)

    def grow(self, tokens: int) -> None:
        """Makes more room, at most for all `tokens` of a rank. Between steps, on all ranks alike."""
        self.tokens = min(tokens, GROWTH * self.tokens)
        self.overflows.zero_()


@dataclass(frozen=True)
class ExpertParallelGroup(RowGroup):
    """The ep group of a rank. With `slots`, tokens travel through slots, otherwise as `mode` says."""

    mode: DispatchMode = "all_to_all"
    slots: ExpertSlots | None = None


class LocalDispatcher(NamedTuple):
    """This rank holds all experts: nothing moves."""

    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]:
        return ready(x)

    def combine(self, x: Tensor) -> AsyncResult[Tensor]:
        return ready(x)


class AllGatherDispatcher(NamedTuple):
    """Every rank gets all tokens of the group. Shapes do not depend on the routing, so the host never waits for it."""

    group: RowGroup

    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]:
        return self.group.all_gather(x)

    def combine(self, x: Tensor) -> AsyncResult[Tensor]:
        return self.group.reduce_scatter(x)


class UnevenGatherDispatcher(NamedTuple):
    """Every rank gets all tokens of the group; `tokens`, which the host knows, are the ranks' numbers of them."""

    group: dist.ProcessGroup
    tokens: tuple[int, ...]
    rank: int

    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]:
        received, rows = x.new_empty(sum(self.tokens), *x.shape[1:]), torch.cat([x] * len(self.tokens))
        sizes = [*self.tokens], [len(x)] * len(self.tokens)
        work = dist.all_to_all_single(received, rows, *sizes, group=self.group, async_op=True)
        return AsyncResult((LayerWork(work, self.group),), lambda: received, rows)

    def combine(self, x: Tensor) -> AsyncResult[Tensor]:
        count, own = len(self.tokens), self.tokens[self.rank]
        returned, x = x.new_empty(count, own, *x.shape[1:]), x.contiguous()
        sizes = [own] * count, [*self.tokens]
        work = dist.all_to_all_single(returned.flatten(0, 1), x, *sizes, group=self.group, async_op=True)
        return AsyncResult((LayerWork(work, self.group),), lambda: returned.sum(0), x)


class AllToAllDispatcher(NamedTuple):
    """A token is sent once to each rank that has experts for it. The host must wait for the numbers of rows."""

    group: dist.ProcessGroup
    tokens: Tensor  # [rows sent] int64, the token of each row; rows are ordered by destination rank
    positions: Tensor  # [T, ep] int64, the row of a token for a rank, -1 for none
    sent: list[int]  # rows by rank
    received: list[int]

    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]:
        received, rows = x.new_empty(sum(self.received), *x.shape[1:]), x[self.tokens]
        work = dist.all_to_all_single(received, rows, self.received, self.sent, group=self.group, async_op=True)
        return AsyncResult((LayerWork(work, self.group),), lambda: received, rows)

    def combine(self, x: Tensor) -> AsyncResult[Tensor]:
        returned, x = x.new_empty(sum(self.sent), *x.shape[1:]), x.contiguous()
        work = dist.all_to_all_single(returned, x, self.sent, self.received, group=self.group, async_op=True)
        return AsyncResult((LayerWork(work, self.group),), lambda: sum_rows(returned, self.positions), x)


class SlotDispatcher(NamedTuple):
    """A token is sent once to each rank that has experts for it, in one of a fixed number of slots per rank, so the
    host never waits for the routing."""

    group: RowGroup
    tokens: Tensor  # [ep, slots] int64, the token in each slot, -1 for none
    positions: Tensor  # [T, ep] int64, the slot of a token for a rank, -1 for none

    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]:
        rows = x[self.tokens.clamp(min=0)]
        if x.dtype in ROUTING_DTYPES:
            rows.masked_fill_((self.tokens < 0).unsqueeze(2), -1)
        return self.group.all_to_all(rows).then(lambda received: received.flatten(0, 1))

    def combine(self, x: Tensor) -> AsyncResult[Tensor]:
        returned = self.group.all_to_all(x.view(*self.tokens.shape, *x.shape[1:]))
        return returned.then(lambda rows: sum_rows(rows.flatten(0, 1), self.positions))


Dispatcher = LocalDispatcher | AllGatherDispatcher | UnevenGatherDispatcher | AllToAllDispatcher | SlotDispatcher


def make_dispatcher(
    experts: Tensor, num_local: int, ep: ExpertParallelGroup, held: tuple[int, ...] = ()
) -> Task[Dispatcher]:
    """The dispatcher for tokens routed to `experts` [T, K]. Each rank of the group holds `num_local` experts, and
    `held[rank]` tokens (empty: all equally many)."""
    group = ep.group
    if group is None:
        return LocalDispatcher()
    if ep.slots is None and ep.mode == "all_gather":
        return UnevenGatherDispatcher(group, held, ep.rank) if held else AllGatherDispatcher(ep)
    visits = torch.zeros(experts.shape[0], group.size(), dtype=torch.bool, device=experts.device)
    visits.scatter_(1, experts // num_local, True)
    if ep.slots is not None:
        return _in_slots(visits, ep, ep.slots)
    sent = visits.sum(0)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    in_flight = AsyncResult((LayerWork(work, group),), lambda: received, sent)
    by_rank = visits.t()
    rows = (by_rank.flatten().cumsum(0) - 1).view_as(by_rank)
    positions = torch.where(by_rank, rows, -1).t().contiguous()
    tokens = by_rank.nonzero()[:, 1]
    yield from in_flight
    return AllToAllDispatcher(group, tokens, positions, sent.tolist(), received.tolist())


def _in_slots(visits: Tensor, ep: ExpertParallelGroup, slots: ExpertSlots) -> SlotDispatcher:
    """The dispatcher for tokens that visit ranks according to `visits` [T, ep]; those that find no slot are left
    out."""
    numbers, room = visits.cumsum(0) - 1, slots.tokens
    slots.overflows += (numbers[-1] >= room).any()
    first = torch.arange(ep.size, device=visits.device) * room
    positions = torch.where(visits & (numbers < room), numbers + first, -1)
    tokens = torch.full((ep.size * room + 1,), -1, device=visits.device)  # the last entry takes those without a slot
    each = torch.arange(len(visits), device=visits.device).unsqueeze(1).expand_as(visits)
    tokens.scatter_(0, torch.where(positions < 0, ep.size * room, positions).flatten(), each.flatten())
    return SlotDispatcher(ep, tokens[:-1].view(ep.size, room), positions)


def pack_routing(experts: Tensor, weights: Tensor) -> Tensor:
    """Chosen experts [T, K] and their weights [T, K] as one message [T, 2K] of integers as wide as the weights."""
    integer = torch.int64 if weights.dtype == torch.float64 else torch.int32
    return torch.cat([experts.to(integer), weights.contiguous().view(integer)], dim=1)


def unpack_routing(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(experts int64, weights) from the message of `pack_routing`."""
    experts, bits = packed.chunk(2, dim=1)
    weights = bits.contiguous().view(torch.float64 if packed.dtype == torch.int64 else torch.float32)
    return experts.to(torch.int64).contiguous(), weights
