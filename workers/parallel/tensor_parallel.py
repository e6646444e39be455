"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, 4.2).

Between the matrix products a rank holds 1 / tp of the tokens. They are all-gathered before a column-parallel product;
the partial sums after a row-parallel product are reduce-scattered.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.schedules.spec.plan import num_tiles
from pentad.workers.parallel.async_ops import (
    AsyncResult,
    LayerWork,
    all_gather_rows,
    ready,
    reduce_scatter,
    reduce_scatter_rows,
)


class TensorParallelGroup(NamedTuple):
    """The tp group of a rank. With a size of 1 there is no group, and nothing is communicated."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    def all_gather(self, x: Tensor) -> AsyncResult[Tensor]:
        """The rows of all tokens [T, ...] from this rank's [T / tp, ...]."""
        return ready(x) if self.group is None else all_gather_rows(x, self.group)

    def reduce_scatter(self, partial: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, ...] of the sum over ranks of partial results [T, ...]."""
        return ready(partial) if self.group is None else reduce_scatter_rows(partial, self.group)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over ranks of x [T, K] @ matrix [K, N].

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

    def all_gather_stacked(self, values: Tensor) -> AsyncResult[Tensor]:
        """The values [...] of all ranks, stacked [tp, ...]."""
        return self.all_gather(values[None])
