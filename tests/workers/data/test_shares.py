"""With data-aware groups, ranks of any mesh read every document of a step once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import DTYPE, mixed
from plans import data_of, plan_on_mesh

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.cp_layout import document_positions
from pentad.schedules.spec.data import Packing
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.batch_loader import Batch, BatchLoader
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.samples import DIGEST_BITS
from pentad.workers.data.sources import open_dataset
from pentad.workers.data.tokenizer import train_tokenizer

MESHES: list[dict[str, Any]] = [{}, {"dp": 2, "pp": 2}, {"cp": 4}, {"tp": 2, "cp": 2}, {"dp": 8}, {"ep": 4, "pp": 2}]
TRAINED = Counter[tuple[int, ...]]  # (token, target, position in its document, slot of its row)


def plan_of_32(folder: Path, sizes: dict[str, Any], packing: Packing) -> Plan:
    """32 sequences of 16 tokens a step, whatever the mesh; a microbatch has a quarter of a replica's."""
    plan = plan_on_mesh(mixed(folder, packing), "1f1b", sizes)
    held = 32 // (4 * plan.batch.replicas) * 16 // plan.mesh.cp
    batch = replace(plan.batch, global_batch_size=32, sequence_length=16, capacity=-(-held * 5 // 16) * 4)
    return replace(plan, batch=replace(batch, document_costs=DocumentCosts(1.0, 3.0, 0.1)))


def batches(plan: Plan, step: int) -> list[Batch]:
    """The batches of all ranks."""
    dataset, found = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed), []
    for rank in range(plan.mesh.size):
        loader = BatchLoader(plan, rank, dataset, torch.device("cpu"))
        found.append(loader(step))
        loader.close()
    return found


def trained(plan: Plan, found: list[Batch]) -> TRAINED:
    """The tokens with a target on the last stage's ranks with tp 0."""
    counts = TRAINED()
    for rank, batch in enumerate(found):
        at = plan.mesh.coordinates(rank)
        for tokens in batch.tokens.values() if at.tp == 0 and at.pp == plan.mesh.pp - 1 else ():
            assert tokens.share is not None
            sizes = {len(each) for each in (tokens.inputs, tokens.targets, tokens.share.positions, tokens.share.slots)}
            assert sizes == {len(tokens.inputs)} and 0 < len(tokens.inputs) <= plan.batch.capacity
            assert len(tokens.inputs) % plan.mesh.tp == 0
            rows = torch.stack((tokens.inputs, tokens.targets, tokens.share.positions, tokens.share.slots), 1)
            counts.update(map(tuple, rows[tokens.targets != IGNORE_INDEX].tolist()))
    return counts


def expected(plan: Plan, step: int) -> TRAINED:
    """What one process would train on."""
    dataset, counts = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed), TRAINED()
    for row, (source, index) in enumerate(zip(*(each.tolist() for each in dataset.rows(step)), strict=True)):
        sample = dataset.sample(source, index)
        positions = document_positions(sample.document_starts, len(sample.inputs))
        tokens = zip(sample.inputs, sample.following, positions, np.full(len(positions), row), strict=True)
        counts.update(
            tuple(map(int, each)) for each, is_target in zip(tokens, sample.is_target, strict=True) if is_target
        )
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("sizes", MESHES)
def test_every_token_is_trained_once_on_any_mesh(folder: Path, sizes: dict[str, Any], packing: Packing) -> None:
    plan = plan_of_32(folder, sizes, packing)
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    for step in (0, 3):
        found = batches(plan, step)
        assert trained(plan, found) == expected(plan, step)
        assert sum(int(each.counts[-1]) for each in found) % 2**DIGEST_BITS == dataset.digest(step)
        assert {each.target_tokens for each in found} <= {0, sum(expected(plan, step).values())}


def test_the_same_groups_are_read_again(folder: Path) -> None:
    plan = plan_of_32(folder, {"dp": 2, "cp": 2}, "documents")
    for one, other in zip(batches(plan, 1), batches(plan, 1), strict=True):
        for a, b in zip(one.tokens.values(), other.tokens.values(), strict=True):
            assert a.share is not None and b.share is not None
            assert a.share[:2] == b.share[:2] and torch.equal(a.inputs, b.inputs)


def test_ten_thousand_short_documents_beside_one_that_three_ranks_share(tmp_path: Path) -> None:
    """Also an empty document, and rows whose last documents leave remainders for the parts of a sequence."""
    sizes = [3] * 5000 + [10_000, 1] + [3] * 4999
    plan = plan_of_documents(tmp_path, sizes, cp=3, rows=4, length=7500)
    found = batches(plan, 0)
    shares = [tokens.share for batch in found for tokens in batch.tokens.values() if tokens.share is not None]
    assert max(len(share.sequence.ranks) for share in shares) == 3 and sum(len(share.local) for share in shares) > 9000
    counts = trained(plan, found)
    assert counts == expected(plan, 0) and sum(counts.values()) == sum(sizes) - len(sizes)


def test_tokens_are_contiguous_where_a_rank_has_nothing_but_its_part_of_a_document(tmp_path: Path) -> None:
    """Kernels require it."""
    plan = plan_of_documents(tmp_path, [65, 65], cp=2, rows=1, length=64)
    shares = [tokens for batch in batches(plan, 0) for tokens in batch.tokens.values() if tokens.share is not None]
    assert [len(tokens.share.sequence.ranks) for tokens in shares if tokens.share] == [2, 2]
    assert not any(tokens.share.local for tokens in shares if tokens.share)
    assert all(kind.is_contiguous() for tokens in shares for kind in (tokens.inputs, tokens.targets))


def plan_of_documents(folder: Path, sizes: list[int], cp: int, rows: int, length: int) -> Plan:
    """Documents of these sizes in rows of `length` tokens, on `cp` ranks with room for 1.25 times an equal share."""
    random = np.random.default_rng(0)
    documents = [Document(np.append(random.integers(1, 257, n - 1), 0).astype(DTYPE), None) for n in sizes]
    corpus = folder / "corpus"
    corpus.mkdir()
    write_index(corpus, train_tokenizer(["a"], 300), [write_shard(corpus, 0, documents, DTYPE)])
    data = data_of(str(corpus), document_mask=True, packing="documents", cache=str(folder))
    plan = plan_on_mesh(data, "1f1b", {"cp": cp})
    capacity = length * 5 // (cp * 4) + 1
    batch = replace(plan.batch, global_batch_size=rows, microbatches=rows, sequence_length=length, capacity=capacity)
    return replace(plan, batch=replace(batch, document_costs=DocumentCosts(0.001, 3.0, 2.0)))
