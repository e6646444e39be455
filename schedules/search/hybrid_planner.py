"""Data-aware groups: which ranks of a pool work on each document of a step, and in which microbatch.

The pool is the dp x ep x cp ranks of a (pp, tp) coordinate. In every microbatch each of them is in one context group,
whose ranks share long documents, and has documents of its own beside those; a group of one only has its own (hybrid
data parallelism, ByteScale, arXiv 2502.21231). Pure functions of the documents' lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pentad.schedules.search.batch_planner import Balance, balanced, end_of
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.cp_layout import Document, Share, StepGroups, expert_ranks, part_of

# The most that a document may take, relative to the least time of the step: the first ones need the fewest ranks.
TARGETS = (2.0, 1.5, 1.2, 1.0, 0.85, 0.75, 0.6, 0.5, 0.42, 0.35, 0.25)
TRIES = 6  # how many of them are tried at most: those whose plans may end first
NARROWER = (2.0, 1.75, 1.5, 1.25)  # tokens that a rank may hold, relative to its even share, if it has room for more
NEAR = 0.005  # plans that could end earlier only by a smaller share are not tried


def documents_of(rows: Sequence[NDArray[np.int64]]) -> tuple[Document, ...]:
    """All documents, from the lengths of those in each row; empty ones are left out."""
    found = list[Document]()
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        parts = zip((ends - lengths).tolist(), lengths.tolist(), strict=True)
        found += (Document(row, first, length) for first, length in parts if length)
    return tuple(found)


@dataclass(eq=False)
class _Group:
    """The ranks of the pool that share `documents`, of this many `tokens` in all, in a microbatch. The group cannot
    begin another document before `begin`, and some rank of it has no more than `room` tokens for that."""

    microbatch: int
    ranks: tuple[int, ...]
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    begin: float = 0.0
    room: int = 0

    def added(self, tokens: int) -> int:
        """How many more tokens each rank gets if this many are added."""
        return part_of(self.tokens + tokens, len(self.ranks)) - part_of(self.tokens, len(self.ranks))


class _Dealt(NamedTuple):
    """Where all documents are: in `groups` or, if on one rank, in `local[rank][microbatch]`; and the seconds of `work`
    of each rank."""

    groups: list[_Group]
    local: list[list[list[int]]]
    work: list[float]

    def shares(self) -> tuple[tuple[Share, ...], ...]:
        """By microbatch and rank. Documents are in the order in which they were drawn."""
        by_rank = [
            [Share((rank,), (), tuple(sorted(own))) for own in microbatches]
            for rank, microbatches in enumerate(self.local)
        ]
        for group in self.groups:
            at, shared = group.microbatch, tuple(sorted(group.documents))
            for rank in group.ranks:
                by_rank[rank][at] = by_rank[rank][at]._replace(ranks=group.ranks, shared=shared)
        return tuple(zip(*by_rank, strict=True))


class _Widths(NamedTuple):
    """The number of `ranks` of each document, its `seconds` [documents] on them, and the `earliest` time at which a
    plan with these may end."""

    earliest: float
    ranks: NDArray[np.int64]
    seconds: NDArray[np.float64]


def hybrid(rows: Sequence[NDArray[np.int64]], batch: BatchSpec, cp: int, ep: int = 1) -> tuple[StepGroups, Balance]:
    """Plans documents, whose lengths are `rows` [rows of the step][documents], on the pool of batch.replicas x cp
    ranks, in which `ep` replicas share the experts.

    A rank holds at most `batch.capacity` tokens of a microbatch. What has no room in the microbatches of the rows goes
    into further ones, which only a step with a full batch may have. Each document gets as many ranks as its tokens
    need, and more where it would take long compared to the step. The result is the plan that ends first, among those
    for TARGETS, each also with NARROWER room, and the rows as they are on the static mesh, which always have room. The
    ranks of a group begin and end a microbatch together, because they pass keys and values around in every layer; so do
    those that exchange tokens of experts.
    """
    costs = batch.document_costs
    assert costs is not None and batch.capacity
    documents, pool = documents_of(rows), batch.replicas * cp
    microbatches = len(rows) // (batch.replicas * batch.micro_batch_size)
    most = batch.most_microbatches if microbatches == batch.microbatches else microbatches
    lengths = np.array([each.length for each in documents], np.int64)
    rooms = [batch.capacity, *(room for room in _narrower(batch, cp) if room < batch.capacity)]
    least = [np.maximum(1, -(-lengths // room)) for room in rooms]
    bounds = [_bound(lengths, ranks, pool, costs) for ranks in least]
    experts = [expert_ranks(rank, cp, ep) for rank in range(pool)]
    best, end = _static(documents, rows, batch, (cp, ep), costs)
    used = dict[tuple[bytes, bytes], int]()  # room that a plan takes: with as much or more it is the same
    for room, ranks, bound in zip(rooms, least, bounds, strict=True):
        for widths in _widths(lengths, ranks, pool, costs, bound)[:TRIES]:
            for order in _orders(widths) if widths.earliest < end * (1 - NEAR) else ():
                key = widths.ranks.tobytes(), order.tobytes()
                if used.get(key, room + 1) <= room:
                    continue
                table = _Table(lengths.tolist(), (microbatches, most), experts, room, end * (1 - 1e-9))
                if table.fill(order.tolist(), widths) and table.end() < table.limit:
                    best, end = table.dealt(), table.end()
                used[key] = room - min(map(min, table.room))
    return StepGroups(documents, best.shares()).trimmed(microbatches), Balance(np.array(best.work), end, bounds[0])


def _narrower(batch: BatchSpec, cp: int) -> Iterator[int]:
    """Room for fewer tokens, with which greedy plans may end earlier."""
    even = batch.micro_batch_size * batch.sequence_length / cp
    return (math.ceil(factor * even) for factor in NARROWER)


def _bound(lengths: NDArray[np.int64], least: NDArray[np.int64], pool: int, costs: DocumentCosts) -> float:
    """A lower bound on when a plan with at least this many ranks for each document ends, in seconds."""
    narrow = costs.shared(lengths, least)
    fastest = np.minimum(narrow, costs.shared(lengths, np.full_like(least, pool)))
    return max(float((least * narrow).sum()) / pool, float(fastest.max(initial=0.0)))


def _widths(
    lengths: NDArray[np.int64], least: NDArray[np.int64], pool: int, costs: DocumentCosts, bound: float
) -> list[_Widths]:
    """The distinct widths for all TARGETS, sorted by when a plan with them may end."""
    ranks = [np.clip(_ranks_for(share * bound, lengths, pool, costs), least, pool) for share in TARGETS]
    found = list[_Widths]()
    for each in {its.tobytes(): its for its in ranks}.values():
        seconds = costs.shared(lengths, each)
        earliest = max(float((each * seconds).sum()) / pool, float(seconds.max(initial=0.0)))
        found.append(_Widths(earliest, each, seconds))
    return sorted(found, key=lambda its: its.earliest)


def _ranks_for(target: float, lengths: NDArray[np.int64], pool: int, costs: DocumentCosts) -> NDArray[np.int64]:
    """[documents] the fewest ranks on which a document takes no longer than `target`, or all of the pool."""
    received = costs.ring * lengths
    room = np.maximum(target - received, 1e-300)
    need = np.clip((costs.alone(lengths) - received) / room * (1 - 1e-12), 1, pool)
    return np.ceil(need).astype(np.int64)


def _orders(widths: _Widths) -> Iterable[NDArray[np.int64]]:
    """Orders in which to deal documents: longest-processing-time first, which balances best, and widest first, which
    finds most room."""
    number = np.arange(len(widths.ranks))
    longest = np.lexsort((number, -widths.ranks, -widths.seconds))
    widest = np.lexsort((number, -widths.seconds, -widths.ranks))
    return (longest,) if (longest == widest).all() else (longest, widest)


class _Table:
    """A plan in the making: seconds of `work` of each rank; by microbatch and rank, `room` for tokens, `seconds`, the
    `most` seconds of those with which the rank exchanges tokens of `experts`, and whether it is in no group.
    `microbatches` are how many are filled first, and how many there may be in all. A plan that does not end before
    `limit` is of no use."""

    def __init__(
        self,
        lengths: Sequence[int],
        microbatches: tuple[int, int],
        experts: Sequence[range],
        capacity: int,
        limit: float,
    ) -> None:
        pool = len(experts)
        self.lengths, self.limit, self.pool, self.experts = lengths, limit, range(pool), experts
        self.first, self.further, self.microbatches = (
            range(microbatches[0]),
            range(*microbatches),
            range(microbatches[1]),
        )
        self.work = [0.0] * pool
        self.idlest = [*self.pool]  # ranks in ascending order of work, until `_deal`
        self.room = [[capacity] * pool for _ in self.microbatches]
        self.seconds = [[0.0] * pool for _ in self.microbatches]
        self.most = [[0.0] * pool for _ in self.microbatches]
        self.is_alone = [[True] * pool for _ in self.microbatches]
        self.local = [[list[int]() for _ in self.microbatches] for _ in self.pool]
        self.groups = defaultdict[int, list[_Group]](list)  # by size

    def fill(self, order: Sequence[int], widths: _Widths) -> bool:
        """Deals all documents. False if one finds no room, or the limit is reached."""
        ranks, times = widths.ranks.tolist(), widths.seconds.tolist()
        last = max((at for at, number in enumerate(order) if ranks[number] > 1), default=-1)
        for number in order[: last + 1]:
            count, seconds = ranks[number], times[number]
            if not (self._share(number, count, seconds) if count > 1 else self._keep(number, seconds)):
                return False
        return self._deal(order[last + 1 :], times)

    def _share(self, document: int, count: int, seconds: float) -> bool:
        """Deals a document to a group of this many ranks: the new or existing one that can begin it first."""
        length, limit = self.lengths[document], self.limit - seconds
        part = part_of(length, count)
        begin, chosen = self._new(self.first, count, part, limit)
        for group in self.groups[count]:
            if group.begin < begin and group.room >= part - 2:  # as last seen: begin only grows, room only shrinks
                self._update(group)
                if group.begin < begin and group.room >= group.added(length):
                    begin, chosen = group.begin, group
        chosen = chosen or self._new(self.further, count, part, limit)[1]
        if chosen is None:
            return False
        self._add(chosen, document, seconds)
        return True

    def _new(self, microbatches: range, count: int, part: int, limit: float) -> tuple[float, _Group | None]:
        """When a new group of ranks with room for a part can begin first, and that group; None if not before
        `limit`."""
        begin, chosen, work = limit, None, self.work
        for at in microbatches:
            if work[self.idlest[count - 1]] >= begin:  # no microbatch can begin earlier
                break
            room, is_alone = self.room[at], self.is_alone[at]
            free = (rank for rank in self.idlest if is_alone[rank] and room[rank] >= part)
            ranks = tuple(islice(free, count))
            if len(ranks) == count and work[ranks[-1]] < begin:
                begin, chosen = work[ranks[-1]], _Group(at, ranks)
        return begin, chosen

    def _add(self, group: _Group, document: int, seconds: float) -> None:
        at, added = group.microbatch, group.added(self.lengths[document])
        if not group.documents:
            group.ranks = tuple(sorted(group.ranks))
            self.groups[len(group.ranks)].append(group)
            for rank in group.ranks:
                self.is_alone[at][rank] = False
        group.documents.append(document)
        group.tokens += self.lengths[document]
        for rank in group.ranks:
            self._work(rank, at, added, seconds)
        self._update(group)
        self.idlest.sort(key=self.work.__getitem__)

    def _update(self, group: _Group) -> None:
        group.begin = max([self.work[rank] for rank in group.ranks])
        group.room = min([self.room[group.microbatch][rank] for rank in group.ranks])

    def _keep(self, document: int, seconds: float) -> bool:
        """Deals a document to the rank with the least work that has room."""
        length = self.lengths[document]
        rank = next((rank for rank in self.idlest if any(room[rank] >= length for room in self.room)), None)
        if rank is None or self.work[rank] + seconds >= self.limit:
            return False
        self._place(rank, document, seconds)
        self.idlest.sort(key=self.work.__getitem__)
        return True

    def _place(self, rank: int, document: int, seconds: float) -> None:
        """Places a document in the microbatch that it prolongs least, of the first ones with room, and among equal ones
        in that with the least work of the rank; if none has room, in the earliest further one that has."""
        length = self.lengths[document]

        def longer(at: int) -> tuple[int, float, float]:
            own = self.seconds[at][rank]
            return max(at, self.first[-1]), max(0.0, seconds - (self.most[at][rank] - own)), own

        at = min((at for at in self.microbatches if self.room[at][rank] >= length), key=longer)
        self.local[rank][at].append(document)
        self._work(rank, at, length, seconds)

    def _work(self, rank: int, microbatch: int, tokens: int, seconds: float) -> None:
        self.room[microbatch][rank] -= tokens
        self.seconds[microbatch][rank] += seconds
        self.work[rank] += seconds
        if (own := self.seconds[microbatch][rank]) > self.most[microbatch][rank]:
            for each in self.experts[rank]:
                self.most[microbatch][each] = own

    def _deal(self, documents: Sequence[int], times: Sequence[float]) -> bool:
        """Deals each document as `_keep` does, in descending order of length."""
        idlest = [(work, rank) for rank, work in enumerate(self.work)]
        heapify(idlest)
        full = list[tuple[int, int]]()  # (-room, rank) of those without room for the document
        for document in documents:
            length, seconds = self.lengths[document], times[document]
            while full and -full[0][0] >= length:
                rank = heappop(full)[1]
                heappush(idlest, (self.work[rank], rank))
            while idlest and (most := max([room[idlest[0][1]] for room in self.room])) < length:
                heappush(full, (-most, heappop(idlest)[1]))
            if not idlest or idlest[0][0] + seconds >= self.limit:
                return False
            rank = idlest[0][1]
            self._place(rank, document, seconds)
            heapreplace(idlest, (self.work[rank], rank))
        return True

    def end(self) -> float:
        """When the last rank is done: ranks of a group wait for each other, as do ranks that share experts."""
        ends, groups = [0.0] * len(self.pool), defaultdict[int, list[_Group]](list)
        for group in chain(*self.groups.values()):
            groups[group.microbatch].append(group)
        for at, seconds in enumerate(self.seconds):
            begins, ends = ends, [begin + each for begin, each in zip(ends, seconds, strict=True)]
            for ranks in self._together(groups[at]):
                if longest := max([seconds[rank] for rank in ranks]):
                    end = max([begins[rank] for rank in ranks]) + longest
                    for rank in ranks:
                        ends[rank] = end
        return max(ends)

    def _together(self, groups: Sequence[_Group]) -> Iterable[Iterable[int]]:
        """The sets of ranks that begin and end a microbatch together, given its groups."""
        if len(self.experts[0]) == 1:
            return [group.ranks for group in groups]
        found = dict[int, set[int]]()
        for ranks in (*dict.fromkeys(self.experts), *(group.ranks for group in groups)):
            joined = {*ranks}.union(*(found.get(rank, ()) for rank in ranks))
            found |= dict.fromkeys(joined, joined)
        return {id(each): each for each in found.values()}.values()

    def dealt(self) -> _Dealt:
        return _Dealt([*chain(*self.groups.values())], self.local, self.work)


def _static(
    documents: Sequence[Document],
    rows: Sequence[NDArray[np.int64]],
    batch: BatchSpec,
    mesh: tuple[int, int],
    costs: DocumentCosts,
) -> tuple[_Dealt, float]:
    """(rows dealt to replicas and microbatches by cost, when the last one ends) with a `mesh` of (cp, ep): the cp ranks
    of a replica share every document."""
    cp, ep = mesh
    work = costs.rows(rows, batch.sequence_length)
    dealt = balanced(work, batch.micro_batch_size, batch.replicas).replicas
    in_row: list[list[int]] = [[] for _ in rows]
    for number, document in enumerate(documents):
        in_row[document.row].append(number)
    lengths = np.array([each.length for each in documents], np.int64)
    seconds = costs.shared(lengths, np.full_like(lengths, cp))
    by_row = np.bincount([each.row for each in documents], seconds, len(rows))
    groups, local = list[_Group](), [[list[int]() for _ in dealt[0]] for _ in range(batch.replicas * cp)]
    for replica, parts in enumerate(dealt):
        for at, part in enumerate(parts):
            numbers = [*chain(*(in_row[row] for row in part))]
            if cp == 1:
                local[replica][at] = numbers
            elif numbers:
                groups.append(_Group(at, tuple(range(replica * cp, (replica + 1) * cp)), numbers))
    of_microbatches = np.array([[float(by_row[[*part]].sum()) for part in parts] for parts in dealt])
    return _Dealt(groups, local, np.repeat(of_microbatches.sum(1), cp).tolist()), end_of(of_microbatches, ep)
