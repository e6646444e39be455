"""Context parallelism: which positions of a sequence each rank holds, and its share of causal attention.

'contiguous': rank r of cp holds the r-th of cp equal chunks, so in causal attention the last rank does 2 cp - 1 times
the work of the first. 'zigzag': of 2 cp equal chunks, rank r holds the r-th and the (2 cp - 1 - r)-th, in this order,
and all ranks do the same work (arXiv 2407.21783, section 3.3.2; striped attention, arXiv 2311.09431, has the same aim).
If documents are packed into a sequence, each is cut into 2 cp chunks (WLB-LLM, arXiv 2503.17924): see
`document_chunks`.

The documents packed into a sequence are given by their first positions, in ascending order, starting with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pentad.schedules.ir.errors import PentadError

CpLayout = Literal["zigzag", "contiguous"]
CpMethod = Literal["ring", "all_gather", "ulysses"]
CP_LAYOUTS: dict[CpMethod, CpLayout] = {"ring": "zigzag", "all_gather": "zigzag", "ulysses": "contiguous"}


class Document(NamedTuple):
    """`length` positions, from `first`, of a row of a step's batch."""

    row: int
    first: int
    length: int


class Share(NamedTuple):
    """What a rank of a pool has in a microbatch: the numbers of the documents that it shares with the other `ranks` of
    its group, joined into one sequence in the zigzag layout, and of its own. Keys and values pass around `ranks` in
    this order."""

    ranks: tuple[int, ...]
    shared: tuple[int, ...]
    local: tuple[int, ...]


class StepGroups(NamedTuple):
    """The documents of a step, and what each rank of a pool has of them: `shares[microbatch][rank]`."""

    documents: tuple[Document, ...]
    shares: tuple[tuple[Share, ...], ...]

    def trimmed(self, least: int) -> StepGroups:
        """Without the last microbatches if no rank has a document in them, but with at least `least`."""
        count = len(self.shares)
        while count > least and not any(share.shared or share.local for share in self.shares[count - 1]):
            count -= 1
        return self._replace(shares=self.shares[:count])

    def microbatches(self, cp: int, ep: int) -> list[int]:
        """How many microbatches each rank of the pool runs: those in which it, or a rank with which it exchanges tokens
        of experts, has a document."""
        held = [[bool(share.shared or share.local) for share in shares] for shares in self.shares]
        peers = [expert_ranks(rank, cp, ep) for rank in range(len(self.shares[0]))]
        return [sum(any(each[peer] for peer in its) for each in held) for its in peers]

    def padded_tokens(self, microbatch: int, ranks: Sequence[int], tp: int) -> tuple[int, ...]:
        """Tokens that each of `ranks`, which run a microbatch together, holds of it, padded to a multiple of tp: none
        unless one of them has a document, and then at least one on each tp rank."""
        found = [self.tokens(self.shares[microbatch][rank]) for rank in ranks]
        return tuple(max(tp, count + -count % tp) if any(found) else 0 for count in found)

    def lengths(self, numbers: Sequence[int]) -> list[int]:
        """The lengths of documents."""
        return [self.documents[number].length for number in numbers]

    def tokens(self, share: Share) -> int:
        """Tokens that a rank holds of its share, with the padding that makes the parts of a sequence equally long."""
        return part_of(sum(self.lengths(share.shared)), len(share.ranks)) + sum(self.lengths(share.local))


def expert_ranks(rank: int, cp: int, ep: int) -> range:
    """The ranks, itself included, with which a rank exchanges tokens of experts, in a pool that numbers dp x ep x cp
    ranks in this order."""
    first = rank - rank // cp % ep * cp
    return range(first, first + ep * cp, cp)


def part_of(tokens: int, ranks: int) -> int:
    """Tokens that each of `ranks` holds of a sequence in the zigzag layout, padded at its end."""
    return 2 * -(-tokens // (2 * ranks))


def document_chunks(lengths: ArrayLike, cp: int) -> NDArray[np.int64]:
    """[documents, 2 cp + 1] the borders within each document of the chunks that it is cut into.

    Chunks of a document differ by at most one token. What equal chunks leave over is dealt to the chunks in turn, each
    document continuing where the one before it ended. So each of the 2 cp chunks gets 1 / (2 cp) of all tokens, and the
    work of any two ranks differs by less than two query-key pairs per token. Raises PentadError unless 2 cp divides the
    number of all tokens."""
    tokens, parts = np.asarray(lengths, np.int64), 2 * cp
    if tokens.sum() % parts:
        raise PentadError(f"documents of {tokens.sum()} tokens: expected a multiple of 2 x {cp} ranks for equal chunks")
    size, rest = np.divmod(tokens, parts)
    turn = (np.arange(parts) - (rest.cumsum() - rest)[:, None]) % parts
    return np.pad((size[:, None] + (turn < rest[:, None])).cumsum(1), ((0, 0), (1, 0)))


def zigzag(cp: int, rank: int) -> tuple[int, int]:
    """The chunks, of 2 cp, that a rank holds."""
    return rank, 2 * cp - 1 - rank


def document_lengths(starts: Sequence[int], length: int) -> NDArray[np.int64]:
    """[documents] the lengths of the documents of a sequence."""
    return np.diff([*starts, length])


def _equal_parts(length: int, cp: int, layout: CpLayout) -> int:
    """The number of parts that a sequence is divided into. Raises PentadError if they are not equal."""
    parts = 1 if cp == 1 else 2 * cp if layout == "zigzag" else cp
    if length % parts:
        factor = "2 x mesh.cp" if layout == "zigzag" else "mesh.cp"
        raise PentadError(f"batch.sequence_length is {length}: expected a multiple of {factor} = {parts}")
    return parts


def positions(length: int, cp: int, rank: int, layout: CpLayout, starts: Sequence[int] = (0,)) -> NDArray[np.int64]:
    """[length / cp] the positions that a rank holds, in its order: with 'zigzag', its first chunk of every document,
    then its second. Raises PentadError when the ranks' parts are not equal."""
    if _equal_parts(length, cp, layout) < 2 * cp:
        size = length // cp
        return np.arange(rank * size, (rank + 1) * size, dtype=np.int64)
    borders = document_chunks(document_lengths(starts, length), cp) + np.asarray(starts)[:, None]
    held = zigzag(cp, rank)
    return _ranges(borders[:, held].T.ravel(), borders[:, [each + 1 for each in held]].T.ravel())


def _ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers of all of these ranges, one after another."""
    sizes = ends - begins
    return np.repeat(begins - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())


def check_context_parallel(length: int, heads: int, kv_heads: int, cp: int, method: CpMethod, tp: int = 1) -> None:
    """Raises PentadError unless cp ranks can share sequences of `length` tokens and, for 'ulysses', the heads that tp
    ranks have split already. Fewer key-value heads than ranks are replicated."""
    _equal_parts(length, cp, CP_LAYOUTS[method])
    if method != "ulysses" or cp == 1:
        return
    ranks = cp * tp
    why = f"mesh.cp x mesh.tp = {ranks} for mesh.cp_method ulysses"
    if heads % ranks:
        raise PentadError(f"model.heads is {heads}: expected a multiple of {why}")
    if kv_heads % ranks and ranks % kv_heads:
        raise PentadError(f"model.kv_heads is {kv_heads}: expected a multiple or a divisor of {why}")


def document_positions(starts: Sequence[int], length: int) -> NDArray[np.int64]:
    """[length] the distance of each position from the start of its document: its rotary position."""
    begins = np.asarray(starts, dtype=np.int64)
    every = np.arange(length, dtype=np.int64)
    return every - begins[np.searchsorted(begins, every, side="right") - 1]


def attention_pairs(length: int, cp: int, rank: int, layout: CpLayout, starts: Sequence[int] = (0,)) -> int:
    """Pairs of a query that a rank holds and a key that the query attends to: the rank's work in causal attention."""
    return int((document_positions(starts, length)[positions(length, cp, rank, layout, starts)] + 1).sum())


def imbalance(length: int, cp: int, layout: CpLayout, starts: Sequence[int] = (0,)) -> float:
    """Causal attention work of the busiest rank over that of the idlest; 1 is perfect balance."""
    work = [attention_pairs(length, cp, rank, layout, starts) for rank in range(cp)]
    return max(work) / min(work)
