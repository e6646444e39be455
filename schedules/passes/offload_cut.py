"""Which bytes of a unit's saved activations leave the device, if only a share of them does.

Nothing is computed again by rows, so the result does not depend on which rows leave. Tensors go as a whole as long as
they fit into the share, the largest first; then the first rows of one more go. What stays of that one moves into memory
of its own, as a part of an allocation cannot be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

ALIGNMENT = 512  # bytes: where a tensor is cut, and where slots of arenas begin


class Cut(NamedTuple):
    """`moved[k]` are the bytes of tensor k that leave, its first ones. `rest` are those that stay of the tensor that is
    cut, 0 if none is."""

    moved: tuple[int, ...]
    rest: int

    @property
    def taken(self) -> int:
        """Bytes of the tensors that leave, all or in part."""
        return self.bytes + self.rest

    @property
    def bytes(self) -> int:
        return sum(self.moved)


def cut(sizes: Sequence[int], fraction: float, most_rest: float = inf) -> Cut:
    """The `fraction`, 0 to 1, of tensors with these sizes in bytes, less than ALIGNMENT bytes below it. A tensor of
    which more than `most_rest` bytes would stay is not cut: all of it stays."""
    left, moved = int(fraction * sum(sizes)), [0] * len(sizes)
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for index in largest_first:
        if sizes[index] <= left:
            moved[index] = sizes[index]
            left -= sizes[index]
    part, staying = left // ALIGNMENT * ALIGNMENT, [index for index in largest_first if not moved[index]]
    if not part or sizes[staying[-1]] - part > most_rest:
        return Cut(tuple(moved), 0)
    moved[staying[-1]] = part
    return Cut(tuple(moved), sizes[staying[-1]] - part)
