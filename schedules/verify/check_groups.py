"""Proves the data-aware groups of a step: documents, memory, and that all exchanges of ranks inside layers meet.

A group passes keys and values round its ranks: F and B of a microbatch on g ranks are g - 1 and 2 g - 1 exchanges in
each layer, in which a rank sends to the next one of the group and receives from the one before. All exchanges of a pool
go over one communicator, so those of different groups must be in an order that every rank keeps. Ranks that hold each
other's experts then exchange tokens: all of them if one has a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.ir.program import Stream
from pentad.schedules.spec.cp_layout import StepGroups, expert_ranks, part_of

Computed = tuple[Op, int]  # F, B or BW of a microbatch


class Exchange(NamedTuple):
    """A rank sends to `to` and receives from `source`, both ranks of the pool, a message of `tokens` tokens."""

    to: int
    source: int
    tokens: int


class ExpertExchange(NamedTuple):
    """An all-to-all of the tokens of a microbatch among ranks of the pool that hold each other's experts."""

    ranks: range
    microbatch: int


Event = Exchange | ExpertExchange


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


def check_rings(groups: StepGroups, stream: Stream, cp: int = 1, ep: int = 1) -> None:
    """Raises PentadError unless all exchanges meet in a pool of a mesh with these sizes, whose ranks run this stream.
    Semantics are rendezvous: an exchange ends only when all its ranks have begun it."""
    order = [
        (part.op, part.microbatch) for part in instructions_of(stream) if part.op in (Op.F, Op.B, Op.BW, Op.RECOMPUTE)
    ]
    pool = range(len(groups.shares[0]))
    check_exchanges([[*_exchanges(groups, rank, order, expert_ranks(rank, cp, ep))] for rank in pool])


def check_exchanges(events: Sequence[Sequence[Event]]) -> None:
    """Raises PentadError unless the events of all ranks, each in its order, meet."""
    at, open_ranks = [0] * len(events), [*range(len(events))]
    while open_ranks:
        rank = open_ranks.pop()
        met = _met(events, at, rank)
        for each in met:
            at[each] += 1
        open_ranks += met
    for rank, (done, own) in enumerate(zip(at, events, strict=True)):
        if done < len(own):
            raise PentadError(f"exchange {done} of rank {rank} of the pool, {own[done]}, never meets its other ends")


def _met(events: Sequence[Sequence[Event]], at: Sequence[int], first: int) -> list[int]:
    """The ranks that meet in the present exchange of `first`: all that exchange tokens with it, or a ring in which each
    receives what the one before it sends; none if they do not meet."""

    def present(rank: int) -> Event | None:
        return events[rank][at[rank]] if at[rank] < len(events[rank]) else None

    if isinstance(own := present(first), ExpertExchange):
        return [*own.ranks] if all(present(rank) == own for rank in own.ranks) else []
    found, rank = list[int](), first
    while isinstance(sent := present(rank), Exchange) and rank not in found:
        found.append(rank)
        following = present(sent.to)
        if not isinstance(following, Exchange) or (following.source, following.tokens) != (rank, sent.tokens):
            return []
        rank = sent.to
        if rank == first:
            return found
    return []


def _exchanges(groups: StepGroups, rank: int, order: Sequence[Computed], experts: range) -> Iterator[Event]:
    """The exchanges of one layer. No rank has a document in microbatches after those of the groups."""
    for op, microbatch in order:
        if microbatch >= len(groups.shares):
            continue
        shares, is_backward = groups.shares[microbatch], op in (Op.B, Op.BW)
        share, found = shares[rank], list[Event]()
        count = len(share.ranks)
        if count > 1:
            place, tokens = share.ranks.index(rank), part_of(sum(groups.lengths(share.shared)), count)
            each = Exchange(share.ranks[(place + 1) % count], share.ranks[place - 1], tokens)
            found += repeat(each, 2 * count - 1 if is_backward else count - 1)
        if len(experts) > 1 and any(shares[peer].shared or shares[peer].local for peer in experts):
            found.append(ExpertExchange(experts, microbatch))
        yield from reversed(found) if is_backward else found
