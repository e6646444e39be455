"""Proves the data-aware groups of a step: documents, memory, and that the ring steps of all groups meet.

A group passes keys and values round its ranks: F and B of a microbatch on g ranks are g - 1 and 2 g - 1 exchanges in
each layer, in which a rank sends to the next one of the group and receives from the one before. All exchanges of a pool
go over one communicator, so those of different groups must be in an order that every rank keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.ir.program import Stream
from pentad.schedules.spec.cp_layout import StepGroups, part_of

Computed = tuple[Op, int]  # F, B or BW of a microbatch


class Exchange(NamedTuple):
    """A rank sends to `to` and receives from `source`, both ranks of the pool, a message of as many tokens."""

    to: int
    source: int
    tokens: int


def check_shares(groups: StepGroups, capacity: int) -> None:
    """Raises PentadError unless every document is on the ranks of one group once, all ranks of a group agree on it, and
    no rank holds more than `capacity` tokens of a microbatch."""
    found = Counter[int]()
    for microbatch, shares in enumerate(groups.shares):
        for rank, share in enumerate(shares):
            where = f"microbatch {microbatch}: rank {rank} of the pool"
            if rank not in share.ranks or len(set(share.ranks)) < len(share.ranks):
                raise PentadError(f"{where} is in the group {share.ranks}: expected a group of different ranks with it")
            first = share.ranks[0]
            for other in share.ranks if rank == first else (first,):
                if (share.ranks, share.shared) != shares[other][:2]:
                    raise PentadError(f"{where} is in another group than rank {other}: expected the same")
            if (tokens := groups.tokens(share)) > capacity:
                raise PentadError(f"{where} has {tokens} tokens: expected at most {capacity}")
            found.update(share.local if rank != first else (*share.shared, *share.local))
    wrong = [number for number in range(len(groups.documents)) if found[number] != 1]
    if wrong or len(found) != len(groups.documents):
        number = wrong[0] if wrong else max(found)
        raise PentadError(f"document {number} of the step is trained {found[number]} times: expected once")


def check_rings(groups: StepGroups, stream: Stream) -> None:
    """Raises PentadError unless all exchanges of a pool whose ranks run this stream meet: with rendezvous semantics,
    where one ends only when both neighbours have begun it."""
    order = [
        (part.op, part.microbatch) for part in instructions_of(stream) if part.op in (Op.F, Op.B, Op.BW, Op.RECOMPUTE)
    ]
    check_exchanges([[*_exchanges(groups, rank, order)] for rank in range(len(groups.shares[0]))])


def check_exchanges(events: Sequence[Sequence[Exchange]]) -> None:
    """Of each rank, in its order."""
    at, open_ranks = [0] * len(events), [*range(len(events))]
    while open_ranks:
        rank = open_ranks.pop()
        ring = _ring(events, at, rank)
        for each in ring:
            at[each] += 1
        open_ranks += ring
    for rank, (done, own) in enumerate(zip(at, events, strict=True)):
        if done < len(own):
            raise PentadError(f"exchange {done} of rank {rank} of the pool, {own[done]}, never meets its other ends")


def _ring(events: Sequence[Sequence[Exchange]], at: Sequence[int], first: int) -> list[int]:
    """The ranks from `first` on whose present exchanges close a ring, in which each receives what the one before it
    sends; none if they do not."""
    found, rank = list[int](), first
    while at[rank] < len(events[rank]):
        found.append(rank)
        sent = events[rank][at[rank]]
        following = events[sent.to][at[sent.to]] if at[sent.to] < len(events[sent.to]) else None
        if following is None or following.source != rank or following.tokens != sent.tokens:
            return []
        rank = sent.to
        if rank == first:
            return found
        if rank in found:
            return []
    return []


def _exchanges(groups: StepGroups, rank: int, order: Sequence[Computed]) -> Iterator[Exchange]:
    """Of one layer. No rank has a document in microbatches after those of the groups."""
    for op, microbatch in order:
        if microbatch >= len(groups.shares):
            continue
        share = groups.shares[microbatch][rank]
        count = len(share.ranks)
        if count > 1:
            place, tokens = share.ranks.index(rank), part_of(sum(groups.lengths(share.shared)), count)
            each = Exchange(share.ranks[(place + 1) % count], share.ranks[place - 1], tokens)
            yield from repeat(each, 2 * count - 1 if op in (Op.B, Op.BW) else count - 1)
