"""Muon on a mesh: every matrix is assembled on one rank, orthogonalized once, and sent back to all its holders.

The result is thus that of one process, however tp, ep, ZeRO and the pipeline divide a matrix. The ranks that hold parts
of the same matrices divide these among themselves by cost, and exchange parts in rounds of bounded size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.kernels.optimizer.newton_schulz import newton_schulz
from pentad.schedules.spec.optimizer import ROUND_ELEMENTS
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import ZeroLayout, zero_group, zero_layout
from pentad.workers.params.local_tensor import LocalMatrix, local_matrices, local_tensors
from pentad.workers.params.update_layout import spans
from pentad.workers.rank_waits import rank_waits

LARGEST_ROUND = 2**28  # elements at most; ROUND_ELEMENTS for each rank of the group if that is less


class Member(NamedTuple):
    """A rank of the group, and its shard of the parameters."""

    rank: int
    tp: int
    layout: ZeroLayout


class MatrixBlock(NamedTuple):
    """The part of a matrix that a tp rank holds: the received `pieces` with these numbers, end to end."""

    rows: slice
    columns: slice
    pieces: tuple[int, ...]


class OwnedMatrix(NamedTuple):
    """A matrix that this rank orthogonalizes, and the blocks it is made of."""

    rows: int
    columns: int
    blocks: tuple[MatrixBlock, ...]


class Result(NamedTuple):
    """What is returned to a holder: elements `span` of its block of an owned matrix."""

    matrix: int
    rows: slice
    columns: slice
    span: slice


class Round(NamedTuple):
    """One exchange on one rank, which sends `sources` of its directions, assembles `matrices` from what it receives,
    returns `results`, and gets back `targets` of its directions. All but the matrices are indexed by rank of the
    group."""

    sources: list[list[slice]]
    pieces: list[list[int]]  # sizes of the pieces received
    matrices: list[OwnedMatrix]
    results: list[list[Result]]
    targets: list[list[slice]]


class MuonExchange:
    """Orthogonalizes the directions of one parameter shard, together with all ranks of its `group`."""

    def __init__(self, plan: Plan, rank: int, shard: ParamShard, group: dist.ProcessGroup | None) -> None:
        self.plan, self.shard, self.group = plan, shard, group
        self.matrices = [_muon_matrices(plan, shard._replace(tp=tp)) for tp in range(plan.mesh.tp)]
        self.members = [_member(plan, shard, each) for each in plan.tp_holders(shard)]
        self.me = next(member for member in self.members if member.rank == rank)
        self.places = self._places()
        sizes = [(matrix.rows, matrix.columns) for matrix in self.matrices[0]]
        owners = share_out(sizes, len(self.members), min(LARGEST_ROUND, ROUND_ELEMENTS * len(self.members)))
        self.rounds = [self._round({n: self.members[owner] for n, owner in each.items()}) for each in owners]

    def run(self, directions: torch.Tensor) -> None:
        """Orthogonalizes the directions [num_muon] of this rank's shard, in place."""
        for each in self.rounds:
            sources = [[directions[at] for at in parts] for parts in each.sources]
            received = self._exchange(sources, each.pieces, directions)
            matrices = _orthogonalized([_assembled(matrix, received, directions) for matrix in each.matrices])
            results = [[_taken(matrices[result.matrix], result) for result in parts] for parts in each.results]
            fetched = self._exchange(results, [[_size(at) for at in parts] for parts in each.targets], directions)
            for at, values in zip(chain(*each.targets), fetched, strict=True):
                directions[at] = values

    def _exchange(
        self, sent: list[list[torch.Tensor]], sizes: list[list[int]], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Sends flat tensors to every rank of the group, and receives tensors of these `sizes` from each."""
        flat = torch.cat([like.new_empty(0), *chain(*sent)])
        if self.group is not None:
            counts = [sum(part.numel() for part in parts) for parts in sent]
            outgoing, flat = flat, like.new_empty(sum(map(sum, sizes)))
            with rank_waits.abandonable():
                dist.all_to_all_single(flat, outgoing, [sum(parts) for parts in sizes], counts, group=self.group)
        return flat.split(list(chain(*sizes))) if flat.numel() else ()

    def _places(self) -> dict[int, list[slice]]:
        """Where this rank's pieces of each matrix lie in its directions, which are in the order of the shard."""
        found = sorted(
            (at.start, number, _size(at))
            for number, matrix in enumerate(self.matrices[self.me.tp])
            for at, _ in self.me.layout.overlap(matrix.start, matrix.end)
        )
        places, end = defaultdict[int, list[slice]](list), 0
        for _, number, size in found:
            places[number].append(slice(end, end + size))
            end += size
        return places

    def _pieces(self, member: Member, number: int) -> list[slice]:
        """The elements that a rank holds of its block of a matrix."""
        matrix = self.matrices[member.tp][number]
        return [span for _, span in member.layout.overlap(matrix.start, matrix.end)]

    def _senders(self, number: int, owner: Member) -> set[int]:
        """The ranks whose pieces make up a matrix on its owner: for each distinct block, one tp rank with all ZeRO
        shards of the owner's replica."""
        blocks: dict[tuple[tuple[int, int], tuple[int, int]], int] = {}
        for tp in (owner.tp, *range(self.plan.mesh.tp)):
            matrix = self.matrices[tp][number]
            blocks.setdefault((matrix.own_rows, matrix.own_columns), tp)
        ranks = zero_group(self.plan, self.shard._replace(tp=owner.tp), owner.rank)
        return {self.plan.mesh.move(rank, tp=tp) for rank in ranks for tp in blocks.values()}

    def _round(self, owners: dict[int, Member]) -> Round:
        """The exchange of matrices, given their owners by number."""
        me, members = self.me, self.members
        owned: dict[int, list[int]] = {member.rank: [] for member in members}
        for number, owner in owners.items():
            owned[owner.rank].append(number)
        senders = {number: self._senders(number, owner) for number, owner in owners.items()}
        blocks: dict[int, dict[int, list[tuple[int, int]]]] = {number: {} for number in owned[me.rank]}
        pieces: list[list[int]] = []
        for source in members:
            pieces.append([])
            for number in (number for number in owned[me.rank] if source.rank in senders[number]):
                for span in self._pieces(source, number):
                    piece = span.start, sum(map(len, pieces))
                    blocks[number].setdefault(source.tp, []).append(piece)
                    pieces[-1].append(_size(span))
        return Round(
            sources=[
                [at for number in owned[to.rank] if me.rank in senders[number] for at in self.places[number]]
                for to in members
            ],
            pieces=pieces,
            matrices=[self._owned(number, blocks[number]) for number in owned[me.rank]],
            results=[
                [
                    Result(place, *_slices(self.matrices[to.tp][number]), span)
                    for place, number in enumerate(owned[me.rank])
                    for span in self._pieces(to, number)
                ]
                for to in members
            ],
            targets=[[at for number in owned[owner.rank] for at in self.places[number]] for owner in members],
        )

    def _owned(self, number: int, blocks: dict[int, list[tuple[int, int]]]) -> OwnedMatrix:
        """The owned matrix, from the pieces (first element, number) of every tp rank's block."""
        found = [
            MatrixBlock(*_slices(self.matrices[tp][number]), tuple(piece for _, piece in sorted(pieces)))
            for tp, pieces in blocks.items()
        ]
        return OwnedMatrix(self.matrices[0][number].rows, self.matrices[0][number].columns, tuple(found))


def share_out(sizes: Sequence[tuple[int, int]], ranks: int, limit: int) -> Iterator[dict[int, int]]:
    """The owner of each matrix with these (rows, columns), by number, in rounds of at most `limit` elements or a single
    matrix. The most expensive matrix of a round is assigned first, each to the rank with the least work so far."""
    loads = [0] * ranks
    for numbers in _rounds([rows * columns for rows, columns in sizes], limit):
        owners = {}
        for number in sorted(numbers, key=lambda number: (-_cost(*sizes[number]), number)):
            owners[number] = min(range(ranks), key=lambda rank: (loads[rank], rank))
            loads[owners[number]] += _cost(*sizes[number])
        yield {number: owners[number] for number in numbers}


def _rounds(elements: Sequence[int], limit: int) -> Iterator[list[int]]:
    current, total = list[int](), 0
    for number, size in enumerate(elements):
        if current and total + size > limit:
            yield current
            current, total = [], 0
        current.append(number)
        total += size
    if current:
        yield current


def _cost(rows: int, columns: int) -> int:
    """Proportional to the FLOPs of `newton_schulz`."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def _muon_matrices(plan: Plan, shard: ParamShard) -> list[LocalMatrix]:
    """Where the parts of all matrices that Muon updates lie in the full buffer of a shard."""
    return [
        matrix._replace(start=start + matrix.start, end=start + matrix.end)
        for local, start, _ in spans(local_tensors(plan, shard))
        if plan.optimizer.rule_of(local.tensor).method == "muon"
        for matrix in local_matrices(local)
    ]


def _member(plan: Plan, shard: ParamShard, rank: int) -> Member:
    tp = plan.mesh.coordinates(rank).tp
    return Member(rank, tp, zero_layout(plan, shard._replace(tp=tp), rank))


def _slices(matrix: LocalMatrix) -> tuple[slice, slice]:
    return slice(*matrix.own_rows), slice(*matrix.own_columns)


def _assembled(matrix: OwnedMatrix, received: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The full matrix, from the pieces received."""
    full = like.new_empty(matrix.rows, matrix.columns)
    for block in matrix.blocks:
        target = full[block.rows, block.columns]
        target.copy_(torch.cat([received[piece] for piece in block.pieces]).view(target.shape))
    return full


def _orthogonalized(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The orthogonalized matrices; those of the same shape are batched."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    found: dict[int, torch.Tensor] = {}
    for numbers in by_shape.values():
        found |= dict(zip(numbers, newton_schulz(torch.stack([matrices[n] for n in numbers])), strict=True))
    return [found[number] for number in range(len(matrices))]


def _taken(matrix: torch.Tensor, result: Result) -> torch.Tensor:
    return matrix[result.rows, result.columns].flatten()[result.span]


def _size(span: slice) -> int:
    return span.stop - span.start
