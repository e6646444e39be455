"""Document masks: a cp rank's causal attention as blocks of queries and keys in which only the diagonal is masked.

Every document is cut into chunks, two for each rank; a rank holds the first ones of all documents, and then the second
ones (schedules/spec/cp_layout.py). A block has the queries of one of its two chunks and the keys of an earlier chunk,
on this rank or another; each document is a segment whose queries all see its keys. With a sliding window, queries and
keys out of reach become segments of their own that see nothing, and of the rest a band is visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pentad.kernels.attention.packed_runs import PackedLengths, PackedRun
from pentad.schedules.spec.cp_layout import CpMethod, document_chunks, document_lengths, zigzag

Numbers = NDArray[np.int64]  # [documents]
BLOCK = 128  # tokens per block of a kernel for segments
CALL_BLOCKS = 8192  # idle blocks of a head that take about as long as another call


class Block(NamedTuple):
    """Slices of this rank's queries and of one rank's keys. Every query sees all keys, or those up to its own position
    (`causal`); `window_left` may hide the earliest of them (see `AttentionOptions`)."""

    queries: slice
    keys: slice
    causal: bool
    lengths: PackedLengths | None = None  # of the segments of all rows, end to end
    fixed_shape: bool = True  # the same for any documents
    window_left: int | None = None


Step = tuple[Block, ...]  # the blocks computed with one rank's keys
DocumentMask = tuple[Step, ...]  # made once for all layers, forward and backward
EVERY = slice(None)


class Packed(NamedTuple):
    """Sequences of documents with these `lengths`, by row, shared by `size` ranks, of which this one is number `rank`.
    With a single row, each rank may also have documents of its own, with `local` tokens each."""

    size: int
    rank: int
    lengths: Sequence[NDArray[np.int64]]
    local: Sequence[int] = ()


def plan_steps(
    method: CpMethod,
    size: int,
    rank: int,
    length: int,
    rows: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    window: int = 0,
) -> DocumentMask:
    """The blocks that a rank computes, by source of the keys, for sequences of `length` tokens in which documents begin
    at positions `rows[b]`. Each token sees the last `window` ones, including itself, or all before it (0).

    ring and all_gather: step t uses the keys of rank - t, and the first block of step 0 covers all queries. ulysses, or
    a group of one: one block of full sequences.
    """
    lengths = [document_lengths(starts, length) for starts in rows]
    is_packed = any(len(each) > 1 for each in lengths)
    if method == "ulysses" or size == 1:
        segments = _segments(np.concatenate(lengths), device) if is_packed else None
        return ((Block(EVERY, EVERY, True, segments, window_left=_left(window)),),)
    if is_packed or window:
        return plan_packed_steps(Packed(size, rank, lengths), device, window)
    chunk, last = length // (2 * size), length // size
    before = Block(EVERY, slice(0, chunk), False)  # the source's first chunk is before all queries, its second after
    between = Block(slice(chunk, last), EVERY, False)  # both chunks of the source are between this rank's two
    others = (before if (rank - step) % size < rank else between for step in range(1, size))
    return ((Block(EVERY, EVERY, True),), *((each,) for each in others))


def plan_packed_steps(packed: Packed, device: torch.device | str, window: int) -> DocumentMask:
    """`plan_steps` for packed sequences. Shapes differ from call to call."""
    size, rank, rows = packed[:3]
    local = np.asarray(packed.local, np.int64)
    borders = [document_chunks(lengths, size) for lengths in rows]
    own = [np.diff(each)[:, chunk] for each in borders for chunk in zigzag(size, rank)]
    first = Block(EVERY, EVERY, True, _segments(np.concatenate([*own, local]), device), False, _left(window))
    tokens = sum(int(lengths.sum()) for lengths in rows)
    if not tokens:
        return ((first,),)
    joined, half = np.concatenate(borders), tokens // len(rows) // (2 * size)
    steps = [tuple(_blocks(joined, rank, (rank - step) % size, half, window, device)) for step in range(size)]
    return (first, *steps[0]), *steps[1:]


def _blocks(
    borders: NDArray[np.int64], rank: int, source: int, half: int, window: int, device: torch.device | str
) -> Iterator[Block]:
    """The blocks of this rank's chunks, of `half` tokens each, with the source's chunks before them."""
    size = borders.shape[1] // 2
    for place, chunk in enumerate(zigzag(size, rank)):
        for other, before in enumerate(zigzag(size, source)):
            if before < chunk:
                at = slice(place * half, (place + 1) * half), slice(other * half, (other + 1) * half)
                spans = borders[:, chunk], borders[:, chunk + 1], borders[:, before], borders[:, before + 1]
                for lengths, left in _visible(*spans, window, device):
                    yield Block(*at, False, lengths, False, left)


def _visible(
    query: Numbers, query_end: Numbers, key: Numbers, key_end: Numbers, window: int, device: torch.device | str
) -> Iterator[tuple[PackedLengths, int | None]]:
    """Segments of the queries from `query` up to `query_end` of each document and of its keys up to `key_end`, which
    precede them; one band width at a time."""
    first, end, left = key, query_end, np.full_like(key, -1)
    if window:
        first = np.maximum(key, query - window + 1)  # the first key that the first query sees
        end = np.minimum(query_end, key_end - 1 + window)  # the end of the queries that see the last key
        # The diagonal of a segment ends at its last query and key. -1: the last query sees all keys.
        left = np.where(end - window > first, key_end - 1 - (end - window), -1)
    is_visible = (end > query) & (key_end > first)
    for band in np.unique(left[is_visible]).tolist():
        queries, keys = (np.where(is_visible & (left == band), its, 0) for its in (end - query, key_end - first))
        none = np.zeros_like(queries)
        seen = np.stack([none, queries, query_end - query - queries], 1)  # queries that see nothing come last
        seeing = np.stack([key_end - key - keys, keys, none], 1)  # keys that no query sees come first
        yield _segments(seen, device, seeing), None if band < 0 else band


def _left(window: int) -> int | None:
    return window - 1 if window else None


def _segments(
    queries: NDArray[np.int64], device: torch.device | str, keys: NDArray[np.int64] | None = None
) -> PackedLengths:
    """Segments of these lengths, without empty ones; the keys' lengths equal the queries' unless given."""
    both = np.stack([queries.ravel(), (queries if keys is None else keys).ravel()])
    return packed_lengths(both[:, both.any(0)], device)


def packed_lengths(lengths: NDArray[np.int64], device: torch.device | str) -> PackedLengths:
    """The segments with [2, segments] numbers of queries and keys, on the device."""
    cuts = similar_neighbours(*lengths)
    parts = [lengths, *(lengths[:, first:end] for first, end in cuts if len(cuts) > 1)]
    ends = [np.pad(part.cumsum(1), ((0, 0), (1, 0))) for part in parts]
    joined = torch.from_numpy(np.concatenate(ends, 1).astype(np.int32, order="C"))  # kernels want C order
    if torch.device(device).type == "cuda":  # from pinned memory, so that the host does not wait for the copy
        joined = joined.pin_memory().to(device, non_blocking=True)
    rows = joined.split([each.shape[1] for each in ends], 1)
    every, *runs = (PackedLengths(cu[0], cu[1], _longest(part)) for part, cu in zip(parts, rows, strict=True))
    borders = ends[0][:, [0, *(end for _, end in cuts)]]
    queries, keys = ([slice(*span) for span in pairwise(each)] for each in borders.tolist())
    return every._replace(runs=tuple(map(PackedRun, queries, keys, runs)))


def _longest(lengths: NDArray[np.int64]) -> tuple[int, int]:
    queries, keys = lengths.max(1).tolist()
    return queries, keys


def similar_neighbours(queries: NDArray[np.int64], keys: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first segment, end) of each run of segments of these lengths [segments]. Neighbours share a run unless the
    blocks that this adds cost more than a call. No run is without queries or without keys if it can be joined to
    another."""
    blocks = -(-np.maximum(queries, keys) // BLOCK)
    first = np.flatnonzero(np.diff(blocks, prepend=-1))
    totals = zip(np.add.reduceat(queries, first).tolist(), np.add.reduceat(keys, first).tolist(), strict=True)
    runs: list[tuple[int, int, int, bool]] = []  # first segment, end, longest one's blocks, whether it may be alone
    for at, end, (q, k) in zip(first.tolist(), [*first[1:].tolist(), len(blocks)], totals, strict=True):
        run = at, end, int(blocks[at]), bool(q and k)
        while runs and (_added_blocks(runs[-1], run) <= CALL_BLOCKS or not (run[3] and runs[-1][3])):
            before = runs.pop()
            run = before[0], end, max(before[2], run[2]), before[3] or run[3]
        runs.append(run)
    return [run[:2] for run in runs]


def _added_blocks(*runs: tuple[int, int, int, bool]) -> int:
    """The blocks that one call for two neighbouring runs has in excess of two calls."""
    longest = max(run[2] for run in runs)
    return sum((end - first) * (longest - its) for first, end, its, _ in runs)
