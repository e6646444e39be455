"""Every target token weighs 1 / (target tokens in the global batch), however few there are in its microbatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import assert_evaluates_like_one_process, with_eval
from exactness import assert_equals_one_process
from fleet import Fleet
from mixtures import random_corpus
from plans import STEPS, data_of, plan_of, with_rampup
from small_models import FAMILIES, HEADS, MOE

from pentad.schedules.spec.data import Packing
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import open_dataset

slow = pytest.mark.slow
PACKED_CP: dict[str, Any] = {"cp": 2, "dp": 2, "model": HEADS}


def masked_plan(
    folder: Path, seed: int, share: float, packing: Packing, name: str, sizes: dict[str, Any], *, ramp: bool
) -> Plan:
    """A plan on documents of 2 to 30 tokens, a random `share` of which are targets."""
    path = random_corpus(folder / "masked", seed, 160, 30, targets=share)
    data = data_of(path, document_mask=True, packing=packing, cache=str(folder))

    def compiled(microbatches: int) -> Plan:
        return plan_of(**{"dp": 1, "pp": 1, **sizes}, name=name, microbatches=microbatches, data=data)

    return with_rampup(compiled(4), {2: 2}, compiled) if ramp else compiled(4)


@pytest.mark.parametrize(
    ("share", "packing", "name", "sizes", "ramp"),
    [
        (0.1, "documents", "1f1b", PACKED_CP, True),
        pytest.param(0.04, "windows", "zb-h2", {"dp": 2, "pp": 2}, True, marks=slow),
        pytest.param(0.3, "documents", "dualpipev", {"dp": 2, "pp": 2}, False, marks=slow),
        pytest.param(0.1, "windows", "1f1b", {"ep": 2, "pp": 2, "model": MOE}, True, marks=slow),
        pytest.param(0.1, "documents", "gpipe", {"cp": 4, "model": HEADS, "cp_method": "ulysses"}, True, marks=slow),
        pytest.param(
            0.1, "documents", "1f1b", {"cp": 2, "pp": 2, "model": HEADS, "cp_method": "all_gather"}, True, marks=slow
        ),
        pytest.param(
            0.1,
            "documents",
            "1f1b",
            {"pp": 2, "cp": 2, "model": replace(FAMILIES["deepseek-v3"], mtp_layers=2)},
            False,
            marks=slow,
        ),
    ],
)
def test_few_targets_in_uneven_microbatches_train_like_one_process(
    fleet: Fleet, tmp_path: Path, share: float, packing: Packing, name: str, sizes: dict[str, Any], ramp: bool
) -> None:
    plan = masked_plan(tmp_path, 1, share, packing, name, sizes, ramp=ramp)
    assert len(set(_targets_by_microbatch(plan))) > 1, "microbatches with as many targets as each other prove nothing"
    assert_equals_one_process(fleet, plan, steps=STEPS)


def _targets_by_microbatch(plan: Plan) -> list[int]:
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    found = list[int]()
    for step in range(STEPS):
        rows = zip(*dataset.rows(step), strict=True)
        targets = np.array([dataset.sample(*map(int, row)).is_target.sum() for row in rows])
        found += targets.reshape(-1, plan.batch.micro_batch_size).sum(1).tolist()
    return found


@slow
@pytest.mark.parametrize("seed", range(6))
def test_any_masks_train_like_one_process(fleet: Fleet, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    packing: Packing = "documents" if random.random() < 0.5 else "windows"
    meshes: list[dict[str, Any]] = [{"dp": 2, "pp": 2}, PACKED_CP, {"tp": 2, "dp": 2}, {"ep": 2, "pp": 2, "model": MOE}]
    sizes = meshes[random.integers(len(meshes))]
    plan = masked_plan(tmp_path, seed, random.uniform(0.02, 0.9), packing, "1f1b", sizes, ramp=random.random() < 0.5)
    assert_equals_one_process(fleet, plan)


@slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("1f1b", PACKED_CP), ("zb-h2", {"dp": 2, "pp": 2}), ("dualpipe", {"pp": 2, "ep": 2, "model": MOE})],
)
def test_masked_data_is_evaluated_like_one_process(
    fleet: Fleet, tmp_path: Path, name: str, sizes: dict[str, Any]
) -> None:
    plan = masked_plan(tmp_path, 2, 0.3, "windows", name, sizes, ramp=False)
    assert_evaluates_like_one_process(fleet, with_eval(plan, 21))
