"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, 4.2).

Between the matrix products a rank holds 1 / tp of the tokens. They are all-gathered before a column-parallel product;
the partial sums after a row-parallel product are reduce-scattered.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import num_tiles
from pentad.workers.parallel.async_ops import AsyncResult, all_gather, ready, reduce_scatter


class TensorParallelGroup:
    """The tp group of a rank. With a size of 1 there is no group, and nothing is communicated."""

    def __init__(self, group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0) -> None:
        self.group, self.size, self.rank = group, size, rank

    def all_gather(self, x: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """The rows of all tokens [T, ...] from this rank's [T / tp, ...]."""
        if self.size == 1:
            return ready(x)
        full, x = x.new_empty(self.size * x.shape[0], *x.shape[1:]), x.contiguous()
        return AsyncResult((all_gather(full, x, group=self.group, async_op=True),), lambda: full, x)

    def reduce_scatter(self, partial: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """This rank's rows [T / tp, ...] of the sum over ranks of partial results [T, ...]."""
        if self.size == 1:
            return ready(partial)
        own, partial = partial.new_empty(partial.shape[0] // self.size, *partial.shape[1:]), partial.contiguous()
        return AsyncResult((reduce_scatter(own, partial, group=self.group, async_op=True),), lambda: own, partial)

    def matmul_reduce_scatter(self, x: torch.Tensor, matrix: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of x [T, K] @ matrix [K, N].

        A long product is cut into tiles, each with some rows of every rank: one is reduced while the next is computed.
        The batched product reads x in place: copying the tiles first cost a dense 8B model under tp2 4 % of a step.
        """
        count = num_tiles(x.shape[0])
        if self.size == 1 or count == 1:
            return self.reduce_scatter(torch.mm(x, matrix))
        rows, matrices = x.view(self.size, -1, x.shape[1]), matrix.expand(self.size, -1, -1)
        own_rows = rows.shape[1]
        own = x.new_empty(own_rows, matrix.shape[1])
        works, partials = [], []
        for start, end in pairwise(own_rows * tile // count for tile in range(count + 1)):
            partial = torch.bmm(rows[:, start:end], matrices).flatten(0, 1)
            works.append(reduce_scatter(own[start:end], partial, group=self.group, async_op=True))
            partials.append(partial)
        return AsyncResult(works, lambda: own, partials)

    def all_gather_stacked(self, values: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """The values [...] of all ranks, stacked [tp, ...]."""
        return self.all_gather(values[None])
