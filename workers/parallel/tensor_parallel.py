"""The ranks that share out a layer's matrices, and between them the tokens of its residual stream.

Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) with sequence parallelism (arXiv 2205.05198, section 4.2):
norms and sums see a rank's own tokens; before a product with a rank's rows of a matrix all tokens are gathered, after
one with its columns partial results are added up and scattered.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import tiles
from pentad.workers.parallel.async_ops import AsyncResult, ready

# torch 2.13 gives them new names
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorRanks:
    """`size` ranks with a communicator, of which this is `number`; alone it has none and does nothing but products."""

    def __init__(self, group: dist.ProcessGroup | None = None, size: int = 1, number: int = 0) -> None:
        self.group, self.size, self.number = group, size, number

    def gather(self, part: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """All tokens' rows [T, ...] from those of this rank [T / size, ...]."""
        if self.size == 1:
            return ready(part)
        whole, part = part.new_empty(self.size * part.shape[0], *part.shape[1:]), part.contiguous()
        return AsyncResult((gather_all(whole, part, group=self.group, async_op=True),), lambda: whole, part)

    def scatter(self, partial: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """This rank's rows [T / size, ...] of the sum of all ranks' partial results [T, ...]."""
        if self.size == 1:
            return ready(partial)
        own, partial = partial.new_empty(partial.shape[0] // self.size, *partial.shape[1:]), partial.contiguous()
        return AsyncResult((scatter_sum(own, partial, group=self.group, async_op=True),), lambda: own, partial)

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """This rank's rows [T / size, N] of the sum of all ranks' x [T, K] @ matrix [K, N].

        Tile by tile, some rows of each rank: they are added up while the next tile is computed. A batched product
        takes them from where they lie: to copy them first cost 8B under tp2 4 % of a step.
        """
        parts = tiles(x.shape[0])
        if self.size == 1 or parts == 1:
            return self.scatter(torch.mm(x, matrix))
        rows, matrices = x.view(self.size, -1, x.shape[1]), matrix.expand(self.size, -1, -1)
        count = rows.shape[1]
        own = x.new_empty(count, matrix.shape[1])
        works, partials = [], []
        for start, end in pairwise(count * part // parts for part in range(parts + 1)):
            partial = torch.bmm(rows[:, start:end], matrices).flatten(0, 1)
            works.append(scatter_sum(own[start:end], partial, group=self.group, async_op=True))
            partials.append(partial)
        return AsyncResult(works, lambda: own, partials)

    def sums(self, values: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """Each rank's values [...], side by side [size, ...]."""
        return self.gather(values[None])
