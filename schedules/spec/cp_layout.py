"""Context parallelism: which positions of a sequence a rank holds, and what of the causal attention falls to it.

'contiguous': rank r of cp holds the r-th of cp equal chunks. Of a causal attention the last rank then does 2 cp - 1
times the work of the first one. 'zigzag' (striped attention's remedy, arXiv 2311.09431, as arXiv 2407.21783, 3.3.2, has
it): of 2 cp equal chunks rank r holds the r-th and the (2 cp - 1 - r)-th, in this order, and all do the same.

Packed documents: a row is told by the positions at which its documents begin, ascending, the first of them 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pentad.schedules.ir.errors import PentadError

Placement = Literal["zigzag", "contiguous"]
CpMethod = Literal["ring", "all_gather", "ulysses"]
PLACEMENTS: dict[CpMethod, Placement] = {"ring": "zigzag", "all_gather": "zigzag", "ulysses": "contiguous"}


def chunks(length: int, cp: int, rank: int, placement: Placement) -> tuple[range, ...]:
    """The positions that a rank holds, as ranges in its order. Raises PentadError where they cannot be equal."""
    if cp == 1:
        return (range(length),)
    parts = 2 * cp if placement == "zigzag" else cp
    if length % parts:
        name = "2 x mesh.cp" if placement == "zigzag" else "mesh.cp"
        raise PentadError(f"batch.sequence_length is {length}: expected a multiple of {name} = {parts}")
    size = length // parts
    numbers = (rank, parts - 1 - rank) if placement == "zigzag" else (rank,)
    return tuple(range(number * size, (number + 1) * size) for number in numbers)


def positions(length: int, cp: int, rank: int, placement: Placement) -> NDArray[np.int64]:
    """The positions that a rank holds, in its order."""
    return np.concatenate([np.arange(c.start, c.stop, dtype=np.int64) for c in chunks(length, cp, rank, placement)])


def check_context(length: int, heads: int, kv_heads: int, cp: int, variant: CpMethod, tp: int = 1) -> None:
    """Raises PentadError unless cp ranks can share sequences of `length` tokens and, for 'exchange', the heads that tp
    ranks have cut already. Key-value heads that are fewer than ranks are exchanged to several of these."""
    chunks(length, cp, 0, PLACEMENTS[variant])
    if variant != "ulysses" or cp == 1:
        return
    ranks = cp * tp
    why = f"mesh.cp x mesh.tp = {ranks} where context ranks exchange heads"
    if heads % ranks:
        raise PentadError(f"model.heads is {heads}: expected a multiple of {why}")
    if kv_heads % ranks and ranks % kv_heads:
        raise PentadError(f"model.kv_heads is {kv_heads}: expected a multiple or a divisor of {why}")


def document_positions(starts: Sequence[int], length: int) -> NDArray[np.int64]:
    """Of every position of a row, its distance from the start of its document: what a rotary embedding turns by."""
    begins = np.asarray(starts, dtype=np.int64)
    every = np.arange(length, dtype=np.int64)
    return every - begins[np.searchsorted(begins, every, side="right") - 1]


def attended(length: int, cp: int, rank: int, placement: Placement, starts: Sequence[int] = (0,)) -> int:
    """Pairs of a query that a rank holds and a key that it sees: the rank's share of the products of an attention."""
    return int((document_positions(starts, length)[positions(length, cp, rank, placement)] + 1).sum())


def balance(length: int, cp: int, placement: Placement, starts: Sequence[int] = (0,)) -> float:
    """Most over least work of a rank in attention. 1: all do the same."""
    work = [attended(length, cp, rank, placement, starts) for rank in range(cp)]
    return max(work) / min(work)
