"""Document masks: causal attention of a cp rank as blocks of queries and keys without a masked pair off the diagonal.

Take two chunks of a sequence, one after the other: at most one document spans both, so only the first queries of the
later chunk see keys of the earlier one, namely its last keys. A block with keys of another rank is therefore always a
full rectangle; document masking only shrinks it.

With a sliding window a query also needs the distance to a key. Blocks then have queries of one chunk and keys of one
chunk, without the queries and keys out of reach, and a band of the rectangle is visible.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise, product
from math import inf
from typing import NamedTuple

import torch

from pentad.kernels.attention.attention_reference import PackedLengths
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpMethod, chunks

Rows = Sequence[tuple[slice, Sequence[int]]]  # rows of a batch, and the positions at which their documents begin


class Block(NamedTuple):
    """Slices of this rank's queries and of one rank's keys: every query sees all keys, or those up to its own position
    (`causal`), of which `window_left` may hide the first (see `AttentionOptions`)."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    lengths: PackedLengths | None = None  # of the documents in a causal block with several
    fixed_shape: bool = True  # the same for any documents
    window_left: int | None = None


Step = tuple[Block, ...]  # the blocks computed with one rank's keys
DocumentMask = tuple[Step, ...]  # made once for all layers, forward and backward


def plan_steps(
    method: CpMethod, size: int, rank: int, length: int, rows: Rows, device: torch.device | str = "cpu", window: int = 0
) -> DocumentMask:
    """The blocks that a rank computes of sequences of `length` tokens, by source of the keys. Each token sees the last
    `window` ones, itself included, or all before it (0).

    ring and all_gather: step t uses the keys of rank - t, and the first block of step 0 covers all queries. ulysses,
    and a group of one: one block of full sequences.
    """
    if method == "ulysses" or size == 1:
        return ((_diagonal_block((range(length),), rows, device, window),),)
    layout = [chunks(length, size, each, CP_LAYOUTS[method]) for each in range(size)]
    first = _diagonal_block(layout[rank], rows, device, window)
    return _ring_steps(first, rank, layout, rows, window)


def plan_group_steps(
    size: int, rank: int, length: int, starts: Sequence[int], local: Sequence[int], device: torch.device, window: int
) -> DocumentMask:
    """`plan_steps` of a rank that has its zigzag part of one sequence of `length` tokens, which `size` ranks share and
    in which documents begin at `starts`, and then documents of its own, of `local` tokens. Shapes are always new."""
    layout: list[Sequence[range]] = [chunks(length, size, each, "zigzag") for each in range(size)] if length else [()]
    lengths = [*_document_lengths(layout[rank], starts, joined=not window), *local]
    every, left = slice(None), window - 1 if window else None
    first = Block(every, every, every, True, _on_device(lengths, device), window_left=left)
    steps: DocumentMask = ((first,),)
    if length:
        steps = _ring_steps(first, rank, layout, [(slice(0, 1), starts)], window)
    return tuple(tuple(block._replace(fixed_shape=False) for block in step) for step in steps)


def _ring_steps(first: Block, rank: int, layout: Sequence[Sequence[range]], rows: Rows, window: int) -> DocumentMask:
    """The `first` block, of this rank's keys, and all others."""
    size = len(layout)
    if window:
        diagonal, *others = (_blocks_within(rank, (rank - step) % size, layout, rows, window) for step in range(size))
        return (first, *diagonal), *others
    return (first,), *(_blocks_from(rank, (rank - step) % size, layout, rows) for step in range(1, size))


def _diagonal_block(own: Sequence[range], rows: Rows, device: torch.device | str, window: int) -> Block:
    """This rank's queries and its own keys, which are in sequence order: plain causal attention. With a window, each
    chunk by itself."""
    lengths = [_document_lengths(own, starts, joined=not window) for _, starts in rows]
    split = any(len(each) > 1 for each in lengths)
    flat = [length for each in lengths for length in each]
    every, left = slice(None), window - 1 if window else None
    return Block(every, every, every, True, _on_device(flat, device) if split else None, window_left=left)


def _blocks_within(rank: int, source: int, layout: Sequence[Sequence[range]], rows: Rows, window: int) -> Step:
    """The blocks of every chunk of this rank's queries and every chunk of another's keys before it, in a window."""
    found, chunk = [], len(layout[rank][0])
    for (number, queries), (other, keys) in product(enumerate(layout[rank]), enumerate(layout[source])):
        if keys.start >= queries.start:
            continue
        unmasked = _within(queries, keys, (0,), window)
        visible = [(row, _within(queries, keys, starts, window)) for row, starts in rows]
        for each, equal in groupby(visible, key=lambda each: each[1]):
            group = [row for row, _ in equal]
            if each is not None:
                batch = slice(group[0].start, group[-1].stop)
                queries_at = slice(number * chunk, number * chunk + each.queries)
                keys_at = slice(other * chunk + each.first_key, other * chunk + each.end_key)
                left = each.window_left
                found.append(Block(batch, queries_at, keys_at, False, None, each == unmasked, left))
    return tuple(found)


class _Band(NamedTuple):
    """The first `queries` of a chunk and the keys of another that any of them sees."""

    queries: int
    first_key: int
    end_key: int
    window_left: int | None  # None: every query sees all of these keys


def _within(queries: range, keys: range, starts: Sequence[int], window: int) -> _Band | None:
    """What is visible between two chunks, in a row with documents at `starts`; None if nothing is."""
    num_queries, num_keys = _visible((queries,), (keys,), starts)
    first = max(keys.stop - num_keys, queries.start - window + 1)  # of the keys that the first query sees
    end = min(queries.start + num_queries, keys.stop - 1 + window)  # of the queries that see the last key
    if end <= queries.start or first >= keys.stop:
        return None
    count, hidden = end - queries.start, end - window - first  # keys that the last query does not see
    # The diagonal of a block ends at its last query and key.
    left = keys.stop - 1 - (end - window) if hidden > 0 else None
    return _Band(count, first - keys.start, keys.stop - keys.start, left)


def _blocks_from(rank: int, source: int, layout: Sequence[Sequence[range]], rows: Rows) -> Step:
    """This rank's queries and the keys of another. In the zigzag layout half of all pairs are masked; none of those is
    computed."""
    chunk = len(layout[rank][0])
    if source < rank:  # the source's first chunk is before all queries, its second one after them
        first, last, queries, keys = 0, chunk, layout[rank], layout[source][:1]
    else:  # both chunks of the source are between this rank's two
        first, last, queries, keys = chunk, 2 * chunk, layout[rank][1:], layout[source]
    found = []
    visible = [(row, _visible(queries, keys, starts)) for row, starts in rows]
    for (num_queries, num_keys), equal in groupby(visible, key=lambda each: each[1]):
        group = [row for row, _ in equal]
        if num_queries:
            batch = slice(group[0].start, group[-1].stop)
            fixed = num_queries == sum(map(len, queries)) and num_keys == last
            at = slice(first, first + num_queries), slice(last - num_keys, last)
            found.append(Block(batch, *at, False, fixed_shape=fixed))
    return tuple(found)


def _visible(queries: Sequence[range], keys: Sequence[range], starts: Sequence[int]) -> tuple[int, int]:
    """How many of the first queries, and of the last keys before them, are in the document that spans both."""
    document = bisect_right(starts, keys[-1].stop - 1)
    if bisect_right(starts, queries[0].start) != document:
        return 0, 0
    begin, end = starts[document - 1], starts[document] if document < len(starts) else inf
    num_queries = sum(len(chunk) if chunk.stop <= end else max(0, int(end) - chunk.start) for chunk in queries)
    return num_queries, sum(max(0, chunk.stop - max(chunk.start, begin)) for chunk in keys)


def _document_lengths(own: Sequence[range], starts: Sequence[int], *, joined: bool) -> list[int]:
    """Lengths of the parts of documents in a rank's chunks, in sequence order; a document that spans chunks is one part
    if they are `joined`."""
    found: list[int] = []
    last = -1  # document at the end of the previous chunk
    for chunk in own:
        inside = starts[bisect_right(starts, chunk.start) : bisect_left(starts, chunk.stop)]
        lengths = [end - begin for begin, end in pairwise((chunk.start, *inside, chunk.stop))]
        if joined and bisect_right(starts, chunk.start) == last:
            found[-1] += lengths.pop(0)
        found += lengths
        last = bisect_right(starts, chunk.stop - 1)
    return found


def _on_device(lengths: Sequence[int], device: torch.device | str) -> PackedLengths:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    if torch.device(device).type == "cuda":  # from pinned memory, so that the host does not wait for the copy
        ends = ends.pin_memory().to(device, non_blocking=True)
    return PackedLengths(ends, ends, (max(lengths), max(lengths)))
