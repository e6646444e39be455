"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, 4.2).

Between the matrix products a rank holds 1 / tp of the tokens. They are all-gathered before a column-parallel product;
the partial sums after a row-parallel product are reduce-scattered. Between the GPUs of one host both overlap with the
product itself: one begins with this rank's own rows while those of others arrive, the other ends with them, after those
of each peer in turn, which that peer reads meanwhile.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pentad.schedules.spec.row_slots import num_tiles
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork, reduce_scatter
from pentad.workers.parallel.row_exchange import RowGroup

SPLIT_ROWS = 1024  # of a rank, from which on its part of a product is computed by itself


class TensorParallelGroup(RowGroup):
    """The tp group of a rank."""

    def gathered_matmul(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> AsyncResult[Tensor]:
        """x @ matrix [K, N] + bias [N] of the rows x of all tokens [T, K], from this rank's [T / tp, K]."""
        return self._gather_matmul(x, matrix, bias, keep=False).then(lambda both: both[1])

    def all_gather_matmul(self, x: Tensor, matrix: Tensor) -> AsyncResult[tuple[Tensor, Tensor]]:
        """(the rows x of all tokens [T, K], x @ matrix [K, N]) from this rank's rows [T / tp, K]."""
        return self._gather_matmul(x, matrix, None, keep=True)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of x [T, K] @ matrix [K, N]."""
        tokens, width = x.shape[0], matrix.shape[1]
        if self.group is None or self.rows is None or not self.rows.fits(tokens * width, x):
            return self._reduce_tiles(x, matrix)
        if tokens < SPLIT_ROWS * self.size:
            return self.reduce_scatter(torch.mm(x, matrix))
        slot = self.rows.slot((tokens, width), x)
        arrived, parts = self._terms(slot)

        def write(peer: int) -> None:
            rows = self._rows_of(peer, tokens)
            torch.mm(x[rows], matrix, out=slot[rows])

        work = LayerWork(self.rows.scatter(parts, write), self.group)
        own = torch.mm(x[self._own(tokens)], matrix)
        return AsyncResult((work,), lambda: self._add(own, arrived), arrived)

    def all_gather_stacked(self, values: Tensor) -> AsyncResult[Tensor]:
        """The values [...] of all ranks, stacked [tp, ...]."""
        return self.all_gather(values[None])

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


def _matmul(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)
