"""Which bytes of a unit's saved activations leave the device, if only a share of them does.

Bytes only move, and nothing is recomputed by rows, so the result does not depend on which rows leave. Whole tensors go,
largest first, as long as they fit into the share; then the first rows of one more. What stays of that tensor moves into
memory of its own, as part of an allocation cannot be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

ALIGNMENT = 512  # bytes: where a tensor is cut, and where slots of arenas begin


class Cut(NamedTuple):
    """`moved[k]` is how many bytes of tensor k, from its start, leave. `rest` is how many stay of the tensor that is
    cut, 0 if none is."""

    moved: tuple[int, ...]
    rest: int

    @property
    def taken(self) -> int:
        """Size in bytes of the tensors that leave, whole or in part."""
        return self.bytes + self.rest

    @property
    def bytes(self) -> int:
        return sum(self.moved)


def cut(sizes: Sequence[int], fraction: float, most_rest: float = inf) -> Cut:
    """The cut that moves `fraction` (0 to 1) of tensors with these sizes in bytes, or less than ALIGNMENT bytes below
    it. A tensor of which more than `most_rest` bytes would stay is not cut: all of it stays."""
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
