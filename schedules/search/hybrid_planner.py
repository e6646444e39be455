"""Data-aware groups: which ranks of a pool work on each document of a step, and in which microbatch.

The pool is the dp x cp ranks of a (pp, tp) coordinate. In every microbatch each of them is in one context group, whose
ranks share long documents, and has documents of its own beside those; a group of one only has its own (hybrid data
parallelism, ByteScale, arXiv 2502.21231). Pure functions of the documents' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pentad.schedules.search.batch_planner import Balance, balanced
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.cp_layout import Document, Share, StepGroups, part_of

# Longest times of a document, over the least time of the step: the first ones need the fewest ranks for it.
TARGETS = (2.0, 1.5, 1.2, 1.0, 0.75, 0.5, 0.35, 0.25)


def documents_of(rows: Sequence[NDArray[np.int64]]) -> tuple[Document, ...]:
    """From the lengths of the documents in each row; empty ones are left out."""
    found = list[Document]()
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        parts = zip((ends - lengths).tolist(), lengths.tolist(), strict=True)
        found += (Document(row, first, length) for first, length in parts if length)
    return tuple(found)


def hybrid(rows: Sequence[NDArray[np.int64]], batch: BatchSpec, cp: int) -> tuple[StepGroups, Balance]:
    """The documents of `rows` [rows of the step][documents] on the pool of batch.replicas x cp ranks.

    A rank holds at most `batch.capacity` tokens of a microbatch. Each document gets as many ranks as its tokens need,
    and more where it would take long compared to the step. Of the plans for all TARGETS, and of the rows as they are on
    the static mesh, which always have room, the one with the earliest end.
    """
    costs = batch.document_costs
    assert costs is not None and batch.capacity
    documents, pool = documents_of(rows), batch.replicas * cp
    microbatches = len(rows) // (batch.replicas * batch.micro_batch_size)
    lengths = np.array([each.length for each in documents], np.int64)
    least = np.maximum(1, -(-lengths // batch.capacity))
    narrow = costs.shared(lengths, least)
    fastest = np.minimum(narrow, costs.shared(lengths, np.full_like(least, pool)))
    bound = max(float((least * narrow).sum()) / pool, float(fastest.max(initial=0.0)))
    best = _static(documents, rows, batch, cp, costs)
    for share in TARGETS:
        wide = np.clip(_ranks_for(share * bound, lengths, pool, costs), least, pool)
        table = _Table(documents, microbatches, pool, batch.capacity)
        if table.fill(wide, costs.shared(lengths, wide)) and max(table.work) < max(best.work) * (1 - 1e-9):
            best = table
    work = np.array(best.work)
    return StepGroups(documents, best.shares()), Balance(work, float(work.max()), bound)


def _ranks_for(target: float, lengths: NDArray[np.int64], pool: int, costs: DocumentCosts) -> NDArray[np.int64]:
    """[documents] the least ranks on which a document takes no longer than `target`, or all of the pool."""
    received = costs.ring * lengths
    room = np.maximum(target - received, 1e-300)
    need = np.minimum((costs.alone(lengths) - received) / room * (1 - 1e-12), pool)
    return np.ceil(need).astype(np.int64)


@dataclass(eq=False)
class _Group:
    """`tokens` are those of its `shared` documents."""

    microbatch: int
    ranks: tuple[int, ...]
    shared: list[int] = field(default_factory=list)
    tokens: int = 0

    def added(self, tokens: int) -> int:
        """Tokens that each rank gets of so many more."""
        return part_of(self.tokens + tokens, len(self.ranks)) - part_of(self.tokens, len(self.ranks))


class _Table:
    """A plan in the making: seconds of `work` of each rank, tokens and seconds by rank and microbatch."""

    def __init__(self, documents: Sequence[Document], microbatches: int, pool: int, capacity: int) -> None:
        self.lengths, self.capacity = [each.length for each in documents], capacity
        self.microbatches, self.pool, self.work = range(microbatches), range(pool), [0.0] * pool
        self.tokens = [[0] * microbatches for _ in self.pool]
        self.seconds = [[0.0] * microbatches for _ in self.pool]
        self.local = [[list[int]() for _ in self.microbatches] for _ in self.pool]
        self.groups = list[_Group]()
        self.is_grouped = [[False] * microbatches for _ in self.pool]

    def fill(self, wide: NDArray[np.int64], seconds: NDArray[np.float64]) -> bool:
        """Documents on `wide` [documents] ranks, in `seconds` [documents]: the widest first, then the longest. False if
        one finds no room."""
        order = np.lexsort((np.arange(len(wide)), -seconds, -wide)).tolist()
        counts, times = wide.tolist(), seconds.tolist()
        several = [document for document in order if counts[document] > 1]
        if not all(self._share(document, counts[document], times[document]) for document in several):
            return False
        return self._deal(order[len(several) :], times)

    def _share(self, document: int, count: int, seconds: float) -> bool:
        """On the group of so many ranks, one that there is or a new one, that can be done with it first."""
        found = [*self._groups_with_room(document, count), *self._new_groups(document, count)]
        if not found:
            return False
        group = min(found, key=lambda group: (max(self.work[rank] for rank in group.ranks), group.microbatch))
        self.share(group, document, seconds)
        return True

    def _groups_with_room(self, document: int, count: int) -> list[_Group]:
        return [
            group
            for group in self.groups
            if len(group.ranks) == count
            and group.added(self.lengths[document]) + max(self.tokens[rank][group.microbatch] for rank in group.ranks)
            <= self.capacity
        ]

    def _new_groups(self, document: int, count: int) -> list[_Group]:
        """Of the ranks with least work of those that have no group yet, in each microbatch."""
        found, part = list[_Group](), part_of(self.lengths[document], count)
        idlest = sorted(self.pool, key=lambda rank: (self.work[rank], rank))
        for at in self.microbatches:
            free = (r for r in idlest if not self.is_grouped[r][at] and self.tokens[r][at] + part <= self.capacity)
            ranks = [rank for rank, _ in zip(free, range(count), strict=False)]
            if len(ranks) == count:
                found.append(_Group(at, tuple(sorted(ranks))))
        return found

    def share(self, group: _Group, document: int, seconds: float) -> None:
        added, at = group.added(self.lengths[document]), group.microbatch
        if not group.shared:
            self.groups.append(group)
        group.shared.append(document)
        group.tokens += self.lengths[document]
        for rank in group.ranks:
            self.is_grouped[rank][at] = True
            self._add(rank, at, added, seconds)

    def _deal(self, documents: Sequence[int], seconds: Sequence[float]) -> bool:
        """Each to the rank with least work that has room, in its microbatch with least work that has. False if none
        has."""
        idlest = [(work, rank) for rank, work in enumerate(self.work)]
        heapify(idlest)
        for document in documents:
            length, full = self.lengths[document], list[tuple[float, int]]()
            while idlest:
                work, rank = heappop(idlest)
                tokens = self.tokens[rank]
                room = [at for at in self.microbatches if tokens[at] + length <= self.capacity]
                if room:
                    at = min(room, key=self.seconds[rank].__getitem__)
                    self.keep(rank, at, document, seconds[document])
                    full.append((work + seconds[document], rank))
                    break
                full.append((work, rank))
            else:
                return False
            for each in full:
                heappush(idlest, each)
        return True

    def keep(self, rank: int, microbatch: int, document: int, seconds: float) -> None:
        self.local[rank][microbatch].append(document)
        self._add(rank, microbatch, self.lengths[document], seconds)

    def _add(self, rank: int, microbatch: int, tokens: int, seconds: float) -> None:
        self.tokens[rank][microbatch] += tokens
        self.seconds[rank][microbatch] += seconds
        self.work[rank] += seconds

    def shares(self) -> tuple[tuple[Share, ...], ...]:
        """By microbatch and rank. Documents are in the order in which they were drawn."""
        groups = {(group.microbatch, rank): group for group in self.groups for rank in group.ranks}

        def share(at: int, rank: int) -> Share:
            group, local = groups.get((at, rank)), tuple(sorted(self.local[rank][at]))
            return (
                Share((rank,), (), local) if group is None else Share(group.ranks, tuple(sorted(group.shared)), local)
            )

        return tuple(tuple(share(at, rank) for rank in self.pool) for at in self.microbatches)


def _static(
    documents: Sequence[Document], rows: Sequence[NDArray[np.int64]], batch: BatchSpec, cp: int, costs: DocumentCosts
) -> _Table:
    """Rows dealt to replicas and microbatches by cost; the cp ranks of a replica share every document."""
    work = costs.rows(rows, batch.sequence_length)
    dealt = balanced(work, batch.micro_batch_size, batch.replicas).replicas
    table = _Table(documents, len(dealt[0]), batch.replicas * cp, batch.capacity)
    in_row: list[list[int]] = [[] for _ in rows]
    for number, document in enumerate(documents):
        in_row[document.row].append(number)
    lengths = np.array(table.lengths, np.int64)
    seconds = costs.shared(lengths, np.full_like(lengths, cp)).tolist()
    for replica, parts in enumerate(dealt):
        for at, part in enumerate(parts):
            group = _Group(at, tuple(range(replica * cp, (replica + 1) * cp)))
            for number in chain(*(in_row[row] for row in part)):
                if cp == 1:
                    table.keep(replica, at, number, seconds[number])
                else:
                    table.share(group, number, seconds[number])
    return table
