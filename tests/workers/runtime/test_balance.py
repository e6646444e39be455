"""Sequences dealt to replicas and microbatches by cost give the same on every mesh, and the same bits after a stop."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exactness import assert_equals_one_process
from fleet import Fleet
from mixtures import mixed
from plans import MODEL, STEPS, plan_of, plan_on_mesh, with_rampup
from resume import assert_repeatable
from small_models import HEADS, MOE
from worker_processes import WorkerProcess, check_recovery

from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.data import Packing
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

slow = pytest.mark.slow
COSTS = DocumentCosts(1.0, 3.0)


def balanced_plan(folder: Path, packing: Packing, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    plan = plan_on_mesh(mixed(folder, packing), name, sizes, **more)
    return replace(plan, batch=replace(plan.batch, document_costs=COSTS))


MESHES = [
    ("documents", "1f1b", {"ep": 2, "pp": 2}, {"model": MOE}),  # its balancing loss is per microbatch
    pytest.param("windows", "1f1b", {"dp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("documents", "zb-h2", {"dp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("documents", "dualpipev", {"dp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("windows", "gpipe", {"dp": 2, "tp": 2}, {}, marks=slow),
    pytest.param("documents", "gpipe", {"dp": 2, "cp": 2}, {"model": HEADS}, marks=slow),
    pytest.param("windows", "gpipe", {"dp": 4}, {"memory_options": MemoryOptions(zero=3)}, marks=slow),
    pytest.param("windows", "zb-h2", {"dp": 2, "pp": 2}, {"post_validation": True}, marks=slow),
]


@pytest.mark.parametrize(("packing", "name", "sizes", "more"), MESHES)
def test_balanced_microbatches_equal_one_process(
    fleet: Fleet, folder: Path, packing: Packing, name: str, sizes: dict[str, int], more: dict[str, Any]
) -> None:
    assert_equals_one_process(fleet, balanced_plan(folder, packing, name, sizes, **more))


def with_ramp(folder: Path, **more: Any) -> Plan:
    """Two microbatches a replica in the first two steps, four from then on."""

    def compiled(microbatches: int) -> Plan:
        return plan_of("1f1b", 2, 2, microbatches, mixed(folder, "documents"), **more)

    plan = compiled(4)
    return with_rampup(replace(plan, batch=replace(plan.batch, document_costs=COSTS)), {2: 2}, compiled)


@slow
@pytest.mark.parametrize("model", [MODEL, MOE])
def test_a_balanced_ramp_equals_one_process(fleet: Fleet, folder: Path, model: ModelSpec) -> None:
    assert_equals_one_process(fleet, with_ramp(folder, model=model), steps=STEPS)


@slow
@pytest.mark.parametrize("is_ramp", [False, True])
def test_balanced_runs_resume_with_the_same_bits(fleet: Fleet, folder: Path, tmp_path: Path, is_ramp: bool) -> None:
    sizes = {"dp": 2, "pp": 2}
    plan = with_ramp(folder) if is_ramp else balanced_plan(folder, "documents", "zb-h2", sizes)
    assert_repeatable(fleet, replace(plan, dtype="float32"), tmp_path)


@slow
@pytest.mark.timeout(150)
def test_a_balanced_run_recovers_with_the_same_bits(workers: list[WorkerProcess], folder: Path) -> None:
    plan = balanced_plan(folder, "documents", "1f1b", {"dp": 2, "pp": 2}, dtype="float32")
    check_recovery(workers, plan, 16, signal.SIGKILL)
