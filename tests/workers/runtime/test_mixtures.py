"""Mixtures, packed documents and loss masks give the same on every mesh, and the same bits after a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import assert_equals_one_process
from fleet import Fleet
from mixtures import mixed, random_corpus
from plans import STEPS, plan_on_mesh
from resume import assert_repeatable
from small_models import FAMILIES, HEADS, MOE

from pentad.schedules.spec.data import DataSpec, Packing, SourceSpec
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.data.sources import open_dataset
from pentad.workers.runtime.results import LossSum

slow = pytest.mark.slow


MESHES = [
    ("documents", "zb-h2", {"pp": 2}, {}),
    pytest.param("windows", "dualpipev", {"pp": 2}, {}, marks=slow),
    pytest.param("documents", "1f1b", {"tp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("windows", "gpipe", {"cp": 2, "dp": 2}, {"model": HEADS}, marks=slow),
    pytest.param("documents", "gpipe", {"cp": 2, "tp": 2}, {"model": HEADS}, marks=slow),
    pytest.param("documents", "1f1b", {"ep": 2, "pp": 2}, {"model": MOE}, marks=slow),
    pytest.param("windows", "gpipe", {"dp": 4}, {"memory_options": MemoryOptions(zero=3)}, marks=slow),
    pytest.param("documents", "1f1b", {"pp": 2}, {"model": replace(FAMILIES["deepseek-v3"], mtp_layers=2)}, marks=slow),
    pytest.param("windows", "zb-h2", {"pp": 2}, {"post_validation": True}, marks=slow),
]


@pytest.mark.parametrize(("packing", "name", "sizes", "more"), MESHES)
def test_a_mixture_equals_one_process(
    fleet: Fleet, folder: Path, packing: Packing, name: str, sizes: dict[str, int], more: dict[str, Any]
) -> None:
    assert_equals_one_process(fleet, plan_on_mesh(mixed(folder, packing), name, sizes, **more))


@slow
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_mixture_resumes_with_the_same_bits(fleet: Fleet, folder: Path, tmp_path: Path, packing: Packing) -> None:
    plan = plan_on_mesh(mixed(folder, packing), "1f1b", {"dp": 2, "pp": 2}, dtype="float32")
    assert_repeatable(fleet, plan, tmp_path)


@slow
def test_a_step_without_targets_has_no_loss_and_no_gradient(fleet: Fleet, tmp_path: Path) -> None:
    path = random_corpus(tmp_path / "silent", 1, 40, 9, targets=0.0)
    outcomes = fleet.run(plan_on_mesh(DataSpec((SourceSpec("silent", path),)), "1f1b", {"pp": 2}), [(0, 1)])
    for outcome in outcomes:
        (result,) = outcome.results
        assert result.sources == (LossSum(0.0, 0),) and result.grad_norm == 0 and not result.skipped


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_sums_by_source_are_those_of_its_rows(folder: Path, packing: Packing) -> None:
    plan = plan_on_mesh(mixed(folder, packing), "gpipe", {"dp": 4})
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    for step in range(STEPS):
        sources, indices = dataset.rows(step)
        counts = np.zeros(3, np.int64)
        for source, index in zip(sources.tolist(), indices.tolist(), strict=True):
            counts[source] += dataset.sample(source, index).is_target.sum()
        assert np.array_equal(dataset.target_counts(step), counts)
