"""The rows of activations that F saves, and those that RECOMPUTE computes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FirstRows(NamedTuple):
    """The first rows of a tensor of which not all were saved."""

    rows: Tensor


class RowSplit(NamedTuple):
    """The first `saved` of every `size` rows; `size` is the number of rows of a rank's residual stream, so that a
    tensor gathered from several ranks keeps the first rows of each."""

    size: int
    saved: int

    def first(self, x: Tensor) -> Tensor:
        """A copy of the first rows, so that the memory of the others is not kept alive."""
        return (
            x.unflatten(0, (-1, self.size))[:, : self.saved].clone(memory_format=torch.contiguous_format).flatten(0, 1)
        )

    def rest(self, x: Tensor) -> Tensor:
        """The other rows; without a copy if they are one rank's."""
        return x.unflatten(0, (-1, self.size))[:, self.saved :].flatten(0, 1)

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """All rows, in their order."""
        parts = first.unflatten(0, (-1, self.saved)), rest.unflatten(0, (-1, self.size - self.saved))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def of_each(self, count: int) -> RowSplit:
        """The split of tensors with `count` rows for each of these."""
        return RowSplit(self.size * count, self.saved * count)
