"""What a rank of a cp group computes of a causal attention: blocks of queries and keys, without what is masked.

Of two chunks of a sequence, one behind the other, one document at most reaches from the earlier into the later: what
the later one's queries see of the earlier one is its last keys, and only the first queries see them. So every block
with keys of other ranks is a full rectangle, and documents make it smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import NamedTuple

import torch

from pentad.kernels.attention.attention_reference import Lengths
from pentad.schedules.spec.cp_layout import PLACEMENTS, CpMethod, chunks

Rows = Sequence[tuple[slice, Sequence[int]]]  # rows of a batch, and where their documents begin


class Block(NamedTuple):
    """Queries of a rank, and the keys among those at hand that they see: all of them, or up to their own (`causal`)."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    lengths: Lengths | None = None  # of the documents inside a causal one, if there are several
    steady: bool = True  # of this size whatever the documents


Step = tuple[Block, ...]  # all that is computed with the same keys at hand


def plan(
    variant: CpMethod, size: int, rank: int, length: int, rows: Rows, device: torch.device | str = "cpu"
) -> tuple[Step, ...]:
    """The steps of a rank, of sequences of `length` tokens.

    'ring' and 'gather': step t takes the keys of rank - t; the first block covers all queries. 'exchange', and a group
    of one: the rank has whole sequences, in one block.
    """
    if variant == "ulysses" or size == 1:
        return ((_own((range(length),), rows, device),),)
    held = [chunks(length, size, each, PLACEMENTS[variant]) for each in range(size)]
    first = (_own(held[rank], rows, device),)
    return first, *(_from(rank, (rank - step) % size, held, rows) for step in range(1, size))


def _own(held: Sequence[range], rows: Rows, device: torch.device | str) -> Block:
    """A rank's queries and its own keys: in their order what a query sees stands before it."""
    runs = [_runs(held, starts) for _, starts in rows]
    cut = any(len(each) > 1 for each in runs)
    flat = [length for each in runs for length in each]
    every = slice(None)
    return Block(every, every, every, True, _lengths(flat, device) if cut else None)


def _from(rank: int, source: int, held: Sequence[Sequence[range]], rows: Rows) -> Step:
    """A rank's queries and the keys of another one: half of all pairs are masked, and not among these (zigzag)."""
    cut = len(held[rank][0])
    if source < rank:  # all queries are behind its first chunk and before its second one
        first, last, queries, keys = 0, cut, held[rank], held[source][:1]
    else:  # it is all between this rank's two chunks
        first, last, queries, keys = cut, 2 * cut, held[rank][1:], held[source]
    found = []
    numbered = [(row, _reach(queries, keys, starts)) for row, starts in rows]
    for (reached, seen), equal in groupby(numbered, key=lambda each: each[1]):
        together = [row for row, _ in equal]
        if reached:
            among = slice(together[0].start, together[-1].stop)
            steady = reached == sum(map(len, queries)) and seen == last
            found.append(Block(among, slice(first, first + reached), slice(last - seen, last), False, steady=steady))
    return tuple(found)


def _reach(queries: Sequence[range], keys: Sequence[range], starts: Sequence[int]) -> tuple[int, int]:
    """How many of the first queries, and of the last keys before them, are of the document that reaches over both."""
    document = bisect_right(starts, keys[-1].stop - 1)
    if bisect_right(starts, queries[0].start) != document:
        return 0, 0
    begin, end = starts[document - 1], starts[document] if document < len(starts) else inf
    reached = sum(len(chunk) if chunk.stop <= end else max(0, int(end) - chunk.start) for chunk in queries)
    return reached, sum(max(0, chunk.stop - max(chunk.start, begin)) for chunk in keys)


def _runs(held: Sequence[range], starts: Sequence[int]) -> list[int]:
    """Lengths of the runs of one document each among positions in their order."""
    found: list[int] = []
    last = -1  # document before the chunk
    for chunk in held:
        inside = starts[bisect_right(starts, chunk.start) : bisect_left(starts, chunk.stop)]
        lengths = [end - begin for begin, end in pairwise((chunk.start, *inside, chunk.stop))]
        if bisect_right(starts, chunk.start) == last:
            found[-1] += lengths.pop(0)
        found += lengths
        last = bisect_right(starts, chunk.stop - 1)
    return found


def _lengths(runs: Sequence[int], device: torch.device | str) -> Lengths:
    ends = torch.tensor([0, *accumulate(runs)], dtype=torch.int32)
    if torch.device(device).type == "cuda":  # from pinned memory the host need not wait for the copy
        ends = ends.pin_memory().to(device, non_blocking=True)
    return Lengths(ends, ends, (max(runs), max(runs)))
