"""Expert parallelism: token dispatchers, which move tokens to the ranks of their experts and results back.

Experts are cut into contiguous blocks of equal size, a block a rank. `dispatch` sends rows [T, ...] of this rank's
tokens to every rank that has an expert for them and returns the rows [T', ...] received; `combine` sends partial
results [T', ...] back and returns their sums [T, ...]. Each is the transpose of the other, so the backward pass uses
the same two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.moe.moe_permute import sum_rows
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork, Task, ready
from pentad.workers.parallel.row_exchange import RowGroup

DispatchMode = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True)
class ExpertParallelGroup(RowGroup):
    """The ep group of a rank."""

    mode: DispatchMode = "all_to_all"


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
    """Every rank gets all tokens of the group, in which each has the number of `tokens` that the host knows."""

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
    """A token is sent once to each rank that has experts for it. The host has to wait for the numbers of rows."""

    group: dist.ProcessGroup
    tokens: Tensor  # [rows sent] int64, the token of each row; rows are ordered by destination rank
    positions: Tensor  # [T, ep] int64, the row sent for a token to a rank, -1 for none
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


Dispatcher = LocalDispatcher | AllGatherDispatcher | UnevenGatherDispatcher | AllToAllDispatcher


def make_dispatcher(
    experts: Tensor, num_local: int, ep: ExpertParallelGroup, held: tuple[int, ...] = ()
) -> Task[Dispatcher]:
    """The dispatcher for tokens routed to `experts` [T, K]; each rank of the group holds `num_local` experts, and so
    many tokens as `held` says (empty: all as many)."""
    group = ep.group
    if group is None:
        return LocalDispatcher()
    if ep.mode == "all_gather":
        return UnevenGatherDispatcher(group, held, ep.rank) if held else AllGatherDispatcher(ep)
    visits = torch.zeros(experts.shape[0], group.size(), dtype=torch.bool, device=experts.device)
    visits.scatter_(1, experts // num_local, True)
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


def pack_routing(experts: Tensor, weights: Tensor) -> Tensor:
    """Chosen experts [T, K] and their weights [T, K] as one message [T, 2K] of integers as wide as the weights."""
    integer = torch.int64 if weights.dtype == torch.float64 else torch.int32
    return torch.cat([experts.to(integer), weights.contiguous().view(integer)], dim=1)


def unpack_routing(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(experts int64, weights) from the message of `pack_routing`."""
    experts, bits = packed.chunk(2, dim=1)
    weights = bits.contiguous().view(torch.float64 if packed.dtype == torch.int64 else torch.float32)
    return experts.to(torch.int64).contiguous(), weights
