"""Ranks of any mesh read every row of a step once, and replicas have as equal work as the planner can give them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import mixed, random_corpus
from plans import data_of, plan_on_mesh

from pentad.schedules.search.batch_planner import balanced
from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.batch_loader import Batch, BatchLoader, rows_by_slot
from pentad.workers.data.samples import DIGEST_BITS
from pentad.workers.data.sources import open_dataset

COSTS = DocumentCosts(1.0, 3.0)
MESHES: list[dict[str, int]] = [{}, {"dp": 2, "pp": 2}, {"ep": 2, "dp": 2}, {"cp": 2, "tp": 2}]


def plan_of_32(folder: Path, sizes: dict[str, int], microbatches: int, costs: DocumentCosts | None = COSTS) -> Plan:
    """32 sequences a step, whatever the mesh."""
    plan = plan_on_mesh(mixed(folder, "documents"), "1f1b", sizes)
    size = 32 // (microbatches * plan.batch.replicas)
    assert size * microbatches * plan.batch.replicas == 32 and plan.program.microbatches == microbatches
    return replace(plan, batch=replace(plan.batch, global_batch_size=32, document_costs=costs))


def batches(plan: Plan, step: int) -> Iterator[Batch]:
    """The batches of all ranks."""
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    for rank in range(plan.mesh.size):
        loader = BatchLoader(plan, rank, dataset, torch.device("cpu"))
        yield loader(step)
        loader.close()


@pytest.mark.parametrize("sizes", MESHES)
def test_balanced_ranks_read_every_row_once_on_any_mesh(folder: Path, sizes: dict[str, Any]) -> None:
    plan = plan_of_32(folder, sizes, 4)
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    drawn = plan_of_32(folder, {}, 4, None)
    for step in (0, 3):
        found = [*batches(plan, step)]
        assert sum(int(each.counts[-1]) for each in found) % 2**DIGEST_BITS == dataset.digest(step)
        (alone,) = batches(drawn, step)
        assert {each.target_tokens for each in found} <= {0, alone.target_tokens}
        for each in found:
            assert sorted(each.rows_by_slot) == [*range(32)]
            assert np.array_equal(each.rows_by_slot, rows_by_slot(dataset, plan.batch, step))
            assert np.array_equal(each.row_sources, dataset.rows(step)[0])


def test_slots_hold_the_rows_that_balance_the_work(folder: Path) -> None:
    plan = plan_of_32(folder, {"dp": 2}, 4)
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    changed = False
    for step in range(4):
        samples = [dataset.sample(*map(int, row)) for row in zip(*dataset.rows(step), strict=True)]
        work = np.array([COSTS.alone(np.diff([*each.document_starts, 8]).tolist()).sum() for each in samples])
        rows = rows_by_slot(dataset, plan.batch, step)
        by_microbatch = work[rows].reshape(2, 4, 4).sum(2)
        assert np.all(np.diff(by_microbatch, axis=1) <= 0), "similar ones follow each other"
        best = balanced(work, 4, 2).balance
        assert by_microbatch.sum(1).max() == best.end and best.gap < 0.02
        changed |= not np.array_equal(rows, np.arange(32))
    assert changed
    assert np.array_equal(rows_by_slot(dataset, replace(plan.batch, document_costs=None), 0), np.arange(32))


@pytest.mark.quiet
def test_256_sequences_of_8192_tokens_are_dealt_in_50_ms_of_cpu(tmp_path: Path) -> None:
    path = random_corpus(tmp_path / "corpus", 0, 2000, 2500)
    plan = plan_on_mesh(data_of(path, document_mask=True, packing="documents", cache=str(tmp_path)), "1f1b", {"dp": 4})
    batch = replace(plan.batch, global_batch_size=256, sequence_length=8192, document_costs=COSTS)
    dataset = open_dataset(plan.data, batch, plan.model.vocab, plan.seed)
    times = []
    for step in range(3):
        since = time.process_time()
        rows_by_slot(dataset, batch, step)
        times.append(time.process_time() - since)
    assert min(times) < 0.05, times
