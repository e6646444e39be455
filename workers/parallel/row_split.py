"""The rows of activations that F saves, and those that RECOMPUTE makes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FirstRows(NamedTuple):
    """The first rows of a tensor that was not saved whole."""

    rows: Tensor


class RowSplit(NamedTuple):
    """The first `saved` of every `size` rows: of a rank's residual stream, or of what was gathered of several ranks',
    which has those of each of them."""

    size: int
    saved: int

    def first(self, x: Tensor) -> Tensor:
        """A copy of the first rows, which keeps the memory of the others from being held."""
        return (
            x.unflatten(0, (-1, self.size))[:, : self.saved].clone(memory_format=torch.contiguous_format).flatten(0, 1)
        )

    def rest(self, x: Tensor) -> Tensor:
        """The other rows, of one rank without a copy."""
        return x.unflatten(0, (-1, self.size))[:, self.saved :].flatten(0, 1)

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """All rows, in their order."""
        parts = first.unflatten(0, (-1, self.saved)), rest.unflatten(0, (-1, self.size - self.saved))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def of_each(self, count: int) -> RowSplit:
        """Of tensors that have `count` rows for each of those."""
        return RowSplit(self.size * count, self.saved * count)
