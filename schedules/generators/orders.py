"""Compute orders made as arrays, a row a rank, all of one length: no instruction is made by itself."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import Array, plain
from pentad.schedules.ir.program import Streams


def streams(op: Array, stage: Array, microbatch: Array) -> Streams:
    """What ranks run; ops are told by their codes."""
    ranks, length = op.shape
    fields = op.astype(np.int8), stage.astype(np.int32), microbatch.astype(np.int32)
    return Streams(plain(np.arange(ranks + 1) * length, *(field.ravel() for field in fields)))


def numbered(kinds: Array, each: int) -> Array:
    """How many of its kind stand before each entry in its row, which has `each` of every kind."""
    numbers = np.empty(kinds.shape, np.int32)
    by_kind = np.argsort(kinds, kind="stable")
    np.put_along_axis(numbers, by_kind, np.tile(np.arange(each), kinds.shape[1] // each)[None], axis=1)
    return numbers
