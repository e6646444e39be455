"""How tokens come to the ranks of their experts and results come home: over the ranks of an expert-parallel group.

E experts are cut into contiguous blocks of E / ranks. `out` takes rows [T, ...] of this rank's tokens to all ranks that
need them and returns the [T', ...] that came here; `home` takes a part of each of those [T', ...] back to where it came
from and returns their sums [T, ...]. Each is the other's transpose, so the backward pass is made of the same two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from pentad.kernels.moe.moe_permute import sum_rows
from pentad.workers.parallel.async_ops import AsyncResult, Turns, ready
from pentad.workers.parallel.tensor_parallel import gather_all as _gather
from pentad.workers.parallel.tensor_parallel import scatter_sum as _scatter

DispatchMode = Literal["all_to_all", "all_gather"]


class ExpertParallelGroup(NamedTuple):
    """This rank's place among those that share the experts; `group` is None where it has them all."""

    group: dist.ProcessGroup | None = None
    number: int = 0
    way: DispatchMode = "all_to_all"


class Stay(NamedTuple):
    """All experts are here."""

    def out(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        return ready(x)

    def home(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        return ready(x)


class Gather(NamedTuple):
    """Every rank gets the tokens of all, T on each, and gives a part of every result: the shapes are known before the
    routing is, and the host waits for nothing."""

    group: dist.ProcessGroup
    ranks: int

    def out(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        whole, x = x.new_empty(self.ranks * x.shape[0], *x.shape[1:]), x.contiguous()
        return AsyncResult((_gather(whole, x, group=self.group, async_op=True),), lambda: whole, x)

    def home(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        mine, x = x.new_empty(x.shape[0] // self.ranks, *x.shape[1:]), x.contiguous()
        return AsyncResult((_scatter(mine, x, group=self.group, async_op=True),), lambda: mine, x)


class Exchange(NamedTuple):
    """A token travels once to each rank that has experts of it, however many. The host has to know how many do."""

    group: dist.ProcessGroup
    tokens: torch.Tensor  # [rows sent] int64, by rank and in order
    positions: torch.Tensor  # [T, ranks] int64, the row sent of a token to a rank, -1 for none
    sent: list[int]  # rows, by rank
    received: list[int]

    def out(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        came, rows = x.new_empty(sum(self.received), *x.shape[1:]), x[self.tokens]
        work = dist.all_to_all_single(came, rows, self.received, self.sent, group=self.group, async_op=True)
        return AsyncResult((work,), lambda: came, rows)

    def home(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        back, x = x.new_empty(sum(self.sent), *x.shape[1:]), x.contiguous()
        work = dist.all_to_all_single(back, x, self.sent, self.received, group=self.group, async_op=True)
        return AsyncResult((work,), lambda: sum_rows(back, self.positions), x)


Route = Stay | Gather | Exchange


def open_route(experts: torch.Tensor, held: int, group: dist.ProcessGroup | None, way: DispatchMode) -> Turns[Route]:
    """For tokens that visit `experts` [T, K], `held` of which are on each rank of the group (None: all are here)."""
    if group is None:
        return Stay()
    ranks = dist.get_world_size(group)
    if way == "all_gather":
        return Gather(group, ranks)
    visits = torch.zeros(experts.shape[0], ranks, dtype=torch.bool, device=experts.device)
    visits.scatter_(1, experts // held, True)
    counts = visits.sum(0)
    theirs = torch.empty_like(counts)
    coming = AsyncResult((dist.all_to_all_single(theirs, counts, group=group, async_op=True),), lambda: theirs, counts)
    by_rank = visits.t()
    places = (by_rank.flatten().cumsum(0) - 1).view_as(by_rank)
    positions = torch.where(by_rank, places, -1).t().contiguous()
    tokens = by_rank.nonzero()[:, 1]
    received = yield from coming
    return Exchange(group, tokens, positions, counts.tolist(), received.tolist())


def pack(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Choices [T, K] and weights [T, K] as one [T, 2K] of integers as wide as the weights, to travel at once."""
    integer = torch.int64 if weights.dtype == torch.float64 else torch.int32
    return torch.cat([experts.to(integer), weights.contiguous().view(integer)], dim=1)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64, weights) of what `pack` made."""
    experts, bits = packed.chunk(2, dim=1)
    weights = bits.contiguous().view(torch.float64 if packed.dtype == torch.int64 else torch.float32)
    return experts.to(torch.int64), weights
