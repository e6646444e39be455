"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, 4.2).

Between the matrix products a rank holds 1 / tp of the tokens. They are all-gathered before a column-parallel product;
the partial sums after a row-parallel product are reduce-scattered. Between the GPUs of one host both overlap with the
product itself: a gathered product starts with this rank's own rows while the others arrive; a scattered one ends with
them, after those of each peer in turn, which the peer reads in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from pentad.schedules.spec.row_slots import num_tiles
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork, reduce_scatter
from pentad.workers.parallel.row_exchange import RowGroup

X = TypeVar("X")
SPLIT_ROWS = 1024  # of a rank; with fewer, its part of a product is not computed separately


class TensorParallelGroup(RowGroup):
    """The tp group of a rank."""

    def overlaps(self, rows: int, elements: int, like: Tensor) -> bool:
        """Whether a message of so many elements overlaps with the product, given `rows` rows per rank."""
        return self.rows is not None and rows >= SPLIT_ROWS and self.rows.fits(elements, like)

    def multiply_gathered(
        self, gathered: AsyncResult[X], own: X, y: Tensor, product: Callable[[X, slice, Tensor], object]
    ) -> AsyncResult[tuple[X, Callable[[], Tensor]]]:
        """(the `gathered` value, a function that completes y [T, N]). `product` writes some rows of y; those of this
        rank are computed from its `own` rows while the others arrive."""
        product(own, slice(None), y[self._own(len(y))])

        def complete(full: X) -> Tensor:
            for others in self._others(len(y)):
                product(full, others, y[others])
            return y

        return gathered.then(lambda full: (full, lambda: complete(full)))

    def multiply_scattered(
        self, shape: tuple[int, int], like: Tensor, product: Callable[[slice, Tensor], object]
    ) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of products of `shape` [T, N], in the dtype of `like`.
        `product` writes some rows: first those of each peer, which reads them in the meantime, then this rank's."""
        assert self.rows is not None and self.group is not None
        slot, tokens = self.rows.slot(shape, like), shape[0]
        arrived, parts = self._terms(slot)

        def write(peer: int) -> None:
            rows = self._rows_of(peer, tokens)
            product(rows, slot[rows])

        work = LayerWork(self.rows.scatter(parts, write), self.group)
        mine = self._own(tokens)
        own = torch.empty_like(slot[mine])
        product(mine, own)
        return AsyncResult((work,), lambda: self._add(own, arrived), arrived)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of x [T, K] @ matrix [K, N].

        If the process group does the reduction, a long product is cut into tiles, each with some rows of every rank:
        one is reduced while the next is computed. The batched product reads x in place: copying the tiles first cost a
        dense 8B model under tp2 4 % of a step.
        """
        count = num_tiles(x.shape[0])
        is_copied = self.rows is not None and self.rows.fits(x.shape[0] * matrix.shape[1], x)
        if self.group is None or is_copied or count == 1:
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

    def all_gather_stacked(self, values: Tensor) -> AsyncResult[Tensor]:
        """The values [...] of all ranks, stacked [tp, ...]."""
        return self.all_gather(values[None])
