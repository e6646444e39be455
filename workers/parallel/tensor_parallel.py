"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, 4.2).

Between the matrix products a rank holds 1 / tp of the tokens. They are all-gathered before a column-parallel product;
the partial sums after a row-parallel product are reduce-scattered. Between the GPUs of one host both overlap with the
product itself: it has this rank's own rows before those of others arrive, and makes those for others before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.spec.plan import num_tiles
from pentad.workers.parallel.async_ops import (
    Arrival,
    AsyncResult,
    LayerWork,
    all_gather_rows,
    ready,
    reduce_scatter,
    reduce_scatter_rows,
)

SPLIT_ROWS = 1024  # of a rank, from which on its part of a product is computed by itself


class Rows(Protocol):
    """Exchanges of rows between tensor ranks, in the same order on each (workers/transport/peer_rows.py)."""

    def begin_step(self) -> None: ...

    def fits(self, elements: int, like: Tensor) -> bool: ...

    def gather(self, own: Tensor, full: Tensor, *, keep: bool) -> Arrival: ...

    def slot(self, shape: Sequence[int], like: Tensor) -> Tensor: ...

    def read(self, parts: Sequence[tuple[int, int, Tensor]]) -> Arrival: ...

    def close(self) -> None: ...


class TensorParallelGroup(NamedTuple):
    """The tp group of a rank. With a size of 1 there is no group, and nothing is communicated. `rows` exchanges what
    fits into its slots."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    rows: Rows | None = None

    def all_gather(self, x: Tensor) -> AsyncResult[Tensor]:
        """The rows of all tokens [T, ...] from this rank's [T / tp, ...]."""
        if self.group is None:
            return ready(x)
        if self.rows is None or not self.rows.fits(x.numel(), x):
            return all_gather_rows(x, self.group)
        full, work = self._gather(self.rows, x.contiguous(), keep=True)
        return AsyncResult((work,), lambda: full, full)

    def reduce_scatter(self, partial: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, ...] of the sum over ranks of partial results [T, ...]."""
        if self.group is None:
            return ready(partial)
        if self.rows is None or not self.rows.fits(partial.numel(), partial):
            return reduce_scatter_rows(partial, self.group)
        slot = self.rows.slot(partial.shape, partial)
        for others in self._others(partial.shape[0]):
            slot[others].copy_(partial[others])
        arrived, work = self._read_terms(self.rows, slot)
        return AsyncResult((work,), lambda: self._add(partial[self._own(partial.shape[0])], arrived), arrived, partial)

    def gathered_matmul(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> AsyncResult[Tensor]:
        """x @ matrix [K, N] + bias [N] of the rows x of all tokens [T, K], from this rank's [T / tp, K]."""
        return self._gather_matmul(x, matrix, bias, keep=False).then(lambda both: both[1])

    def all_gather_matmul(self, x: Tensor, matrix: Tensor) -> AsyncResult[tuple[Tensor, Tensor]]:
        """(the rows x of all tokens [T, K], x @ matrix [K, N]) from this rank's rows [T / tp, K]."""
        return self._gather_matmul(x, matrix, None, keep=True)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of x [T, K] @ matrix [K, N]."""
        tokens, width = x.shape[0], matrix.shape[1]
        if self.rows is None or not self.rows.fits(tokens * width, x):
            return self._reduce_tiles(x, matrix)
        if tokens < SPLIT_ROWS * self.size:
            return self.reduce_scatter(torch.mm(x, matrix))
        slot = self.rows.slot((tokens, width), x)
        for others in self._others(tokens):
            torch.mm(x[others], matrix, out=slot[others])
        arrived, work = self._read_terms(self.rows, slot)
        own = torch.mm(x[self._own(tokens)], matrix)
        return AsyncResult((work,), lambda: self._add(own, arrived), arrived)

    def all_gather_stacked(self, values: Tensor) -> AsyncResult[Tensor]:
        """The values [...] of all ranks, stacked [tp, ...]."""
        return self.all_gather(values[None])

    def begin_step(self) -> None:
        """A step or a round of an evaluation follows, on all ranks of the group."""
        if self.rows is not None:
            self.rows.begin_step()

    def close(self) -> None:
        """Call after this rank's last copy is done."""
        if self.rows is not None:
            self.rows.close()

    def _gather_matmul(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, *, keep: bool
    ) -> AsyncResult[tuple[Tensor, Tensor]]:
        """(rows, their product), with this rank's among the rows if it is to `keep` them."""
        if self.rows is None or x.shape[0] < SPLIT_ROWS or not self.rows.fits(x.numel(), x):
            return self.all_gather(x).then(lambda full: (full, _matmul(full, matrix, bias)))
        x = x.contiguous()
        full, work = self._gather(self.rows, x, keep=keep)
        tokens = full.shape[0]
        y = x.new_empty(tokens, matrix.shape[1])
        _matmul(x, matrix, bias, y[self._own(tokens)])

        def complete() -> tuple[Tensor, Tensor]:
            for others in self._others(tokens):
                _matmul(full[others], matrix, bias, y[others])
            return full, y

        return AsyncResult((work,), complete, full)

    def _reduce_tiles(self, x: Tensor, matrix: Tensor) -> AsyncResult[Tensor]:
        """As `matmul_reduce_scatter`, by the process group.

        A long product is cut into tiles, each with some rows of every rank: one is reduced while the next is computed.
        The batched product reads x in place: copying the tiles first cost a dense 8B model under tp2 4 % of a step.
        """
        count = num_tiles(x.shape[0])
        if self.group is None or count == 1:
            return self.reduce_scatter(torch.mm(x, matrix))
        rows, matrices = x.view(self.size, -1, x.shape[1]), matrix.expand(self.size, -1, -1)
        own_rows = rows.shape[1]
        own = x.new_empty(own_rows, matrix.shape[1])
        works, partials = [], []
        for start, end in pairwise(own_rows * tile // count for tile in range(count + 1)):
            partial = torch.bmm(rows[:, start:end], matrices).flatten(0, 1)
            work = reduce_scatter(own[start:end], partial, group=self.group, async_op=True)
            works.append(LayerWork(work, self.group))
            partials.append(partial)
        return AsyncResult(works, lambda: own, partials)

    def _own(self, tokens: int) -> slice:
        """This rank's rows of so many."""
        return slice(self.rank * tokens // self.size, (self.rank + 1) * tokens // self.size)

    def _others(self, tokens: int) -> list[slice]:
        """All other rows: those before and those after."""
        own = self._own(tokens)
        return [each for each in (slice(0, own.start), slice(own.stop, tokens)) if each.start < each.stop]

    def _gather(self, rows: Rows, x: Tensor, *, keep: bool) -> tuple[Tensor, LayerWork]:
        """(the rows of all ranks, of which those of the others arrive, what is in flight)"""
        assert self.group is not None
        full = x.new_empty(self.size, *x.shape)
        return full.flatten(0, 1), LayerWork(rows.gather(x, full, keep=keep), self.group)

    def _read_terms(self, rows: Rows, slot: Tensor) -> tuple[Tensor, LayerWork]:
        """(partial results [tp - 1, T / tp, ...] of other ranks for this one's rows, what is in flight); `slot`
        [T, ...] has this rank's for theirs."""
        assert self.group is not None
        own = slot[self._own(slot.shape[0])]
        others = [index for index in range(self.size) if index != self.rank]
        arrived, start = own.new_empty(len(others), *own.shape), self.rank * own.numel()
        arrival = rows.read([(index, start, term) for index, term in zip(others, arrived, strict=True)])
        return arrived, LayerWork(arrival, self.group)

    def _add(self, own: Tensor, arrived: Tensor) -> Tensor:
        """The sum of the ranks' terms, in the order of ranks."""
        total = torch.empty_like(own)
        add_shards_(total.view(-1), own.view(-1), arrived.flatten(1), self.rank, accumulate=False)
        return total


def _matmul(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)
