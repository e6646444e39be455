"""The balance of a plan is that of the documents that its steps read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mixtures import mixed
from plans import MODEL, plan_on_mesh

from pentad.orchestrator.planning.balance import data_balance
from pentad.orchestrator.planning.estimate import document_costs, flops_per_token
from pentad.schedules.spec.data import Packing
from pentad.workers.data.sources import open_dataset, open_prepared


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_balance_is_of_the_samples_that_steps_read(tmp_path: Path, packing: Packing) -> None:
    plan = plan_on_mesh(mixed(tmp_path, packing), "gpipe", {"dp": 2, "cp": 2})
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    costs = document_costs(MODEL, 8)
    work = []
    for source, index in zip(*(each.tolist() for each in dataset.rows(0)), strict=True):
        starts = dataset.sample(source, index).document_starts
        read = np.diff([*starts, 8]).tolist()
        work.append(read)
    lengths = [row.tolist() for row in dataset.document_lengths(0)]
    assert all(read[: len(each)] == each and sum(each) <= 8 for read, each in zip(work, lengths, strict=True))
    halves = [costs.alone([n for row in half for n in row]).sum() for half in (work[:8], work[8:])]
    found = data_balance(plan, dataset, 1)
    assert found.steps == 1 and found.fixed == pytest.approx(max(halves) / np.mean(halves))
    assert found.fixed >= found.packed - 1e-12
    assert min(found.packed, found.dynamic) >= 1 - 1e-12


def test_costs_of_a_document_are_the_flops_of_training_on_it() -> None:
    costs = document_costs(MODEL, 8)
    assert costs.alone([1, 8]).tolist() == pytest.approx([n * flops_per_token(MODEL, n) for n in (1, 8)])


def test_nothing_is_packed_to_look_at_it(tmp_path: Path) -> None:
    plan = plan_on_mesh(mixed(tmp_path, "documents"), "gpipe", {"dp": 2})
    assert open_prepared(plan.data, plan.batch, plan.model.vocab, plan.seed) is None
    open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    assert open_prepared(plan.data, plan.batch, plan.model.vocab, plan.seed) is not None
