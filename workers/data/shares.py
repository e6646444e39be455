"""A rank's tokens in a step whose documents are dealt to groups of ranks (data-aware groups)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.cp_layout import StepGroups, expert_ranks, part_of, positions
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.check_groups import check_shares
from pentad.workers.data.samples import DIGEST_BITS, Dataset, MapRows, Sample, document_digest
from pentad.workers.parallel.context_share import PADDING_SLOT, SharedSequence

KINDS = 4  # arrays of tokens: inputs, targets, positions in the document, slots of the row


class HostShare(NamedTuple):
    """A ContextShare on the host; `tokens` [KINDS, T] int64."""

    sequence: SharedSequence
    local: tuple[int, ...]
    expert_tokens: tuple[int, ...]
    tokens: np.ndarray


def step_groups(dataset: Dataset, batch: BatchSpec, mesh: Mesh, step: int, map_rows: MapRows = map) -> StepGroups:
    """The groups of a step: a function of its documents' lengths, so that all ranks get the same. `map_rows` may read
    rows in parallel."""
    groups, _ = hybrid(dataset.document_lengths(step, map_rows), batch, mesh.cp, mesh.ep)
    check_shares(groups, batch.capacity)
    return groups


def read_shares(
    plan: Plan,
    rank: int,
    dataset: Dataset,
    step: int,
    groups: StepGroups,
    counted: set[int],
    map_rows: MapRows,
) -> tuple[list[HostShare], int]:
    """(this rank's shares of the groups' microbatches, the digest of the documents that it counts). In the microbatches
    `counted`, the first rank of a group counts the documents shared by the group, and each rank its local ones."""
    here = plan.mesh.place_in_pool(rank)
    peers = expert_ranks(here, plan.mesh.cp, plan.mesh.ep)
    own = [shares[here] for shares in groups.shares]
    numbers = sorted({number for share in own for number in (*share.shared, *share.local)})
    samples = _read(dataset, step, groups, numbers, map_rows)
    slots = _slots(plan.batch, step)
    held, digest = list[HostShare](), 0
    for mb, share in enumerate(own):
        place, counts = share.ranks.index(here), groups.padded_tokens(mb, peers, plan.mesh.tp)
        for number in (*(share.shared if place == 0 else ()), *share.local) if mb in counted else ():
            digest += document_digest(step, *groups.documents[number][:2], samples[number])
        arrays = {n: _arrays(samples[n], slots[groups.documents[n].row]) for n in (*share.shared, *share.local)}
        shared, local = ([arrays[number] for number in each] for each in share[1:])
        held.append(_share(share.ranks, place, shared, local, counts, peers.index(here)))
    return held, digest % 2**DIGEST_BITS


def _read(
    dataset: Dataset, step: int, groups: StepGroups, numbers: Iterable[int], map_rows: MapRows
) -> dict[int, Sample]:
    """The documents by number; those of a row are read together."""
    sources, indices = (each.tolist() for each in dataset.rows(step))
    by_row = defaultdict[int, list[int]](list)
    for number in numbers:
        by_row[groups.documents[number].row].append(number)

    def read(row: int) -> list[Sample]:
        parts = [groups.documents[number][1:] for number in by_row[row]]
        return dataset.documents(sources[row], indices[row], parts)

    read_rows = zip(by_row.values(), map_rows(read, by_row), strict=True)
    return {number: each for found, samples in read_rows for number, each in zip(found, samples, strict=True)}


def _slots(batch: BatchSpec, step: int) -> np.ndarray:
    """[rows of the step]: the slots that the rows would have in a full batch, in the order in which they are drawn."""
    rows = batch.sizes.size(step)
    each, full = rows // batch.replicas, batch.global_batch_size // batch.replicas
    return np.arange(rows) // each * full + np.arange(rows) % each


def _arrays(sample: Sample, slot: int) -> np.ndarray:
    """[KINDS, T]: the arrays of a document."""
    count = len(sample.inputs)
    targets = np.where(sample.is_target, sample.following, IGNORE_INDEX)
    return np.stack([sample.inputs, targets, np.arange(count), np.full(count, slot)])


def _padding(count: int) -> np.ndarray:
    return np.repeat([[0], [IGNORE_INDEX], [0], [PADDING_SLOT]], count, axis=1)


def _share(
    ranks: tuple[int, ...],
    place: int,
    shared: Sequence[np.ndarray],
    local: Sequence[np.ndarray],
    counts: tuple[int, ...],
    number: int,
) -> HostShare:
    """A rank's share, padded so that the shared sequence has equal parts and this rank, `number` of those that exchange
    expert tokens, has `counts[number]` tokens."""
    found, starts = (
        np.concatenate([_padding(0), *shared], axis=1),
        [*accumulate((x.shape[1] for x in shared), initial=0)],
    )
    length = part_of(starts[-1], len(ranks)) * len(ranks)
    found = np.concatenate([found, _padding(length - starts[-1])], axis=1)
    begins = tuple(start for start in starts if start < length)
    if length:
        found = found[:, positions(length, len(ranks), place, "zigzag", begins)]
    padding = counts[number] - found.shape[1] - sum(x.shape[1] for x in local)
    own = [*local, _padding(padding)] if padding else local
    lengths = tuple(x.shape[1] for x in own)
    sequence, tokens = SharedSequence(ranks, place, length, begins), np.concatenate([found, *own], axis=1)
    return HostShare(sequence, lengths, counts, tokens)
