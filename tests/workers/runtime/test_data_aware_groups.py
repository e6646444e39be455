"""Documents on groups of ranks that change with every step and microbatch train like one process."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from evaluations import assert_evaluates_like_one_process, with_eval
from exactness import assert_equals_one_process
from fleet import Fleet
from group_reference import groups_of
from plans import STEPS
from random_groups import grouped_plan, random_groups
from resume import assert_repeatable
from small_models import FAMILIES
from worker_processes import WorkerProcess, check_recovery

from pentad.orchestrator.activations.offloaded_tensors import cuts_of, with_slots
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.lanes.streams import HostStreams
from pentad.workers.runtime.activation_offload import ActivationOffload

slow = pytest.mark.slow
SHALLOW_MIXTRAL = replace(FAMILIES["mixtral"], layers=4)


def group_sizes(plan: Plan, planner: Any) -> Counter[int]:
    """How many ranks are in groups of each size, over the microbatches of all steps; size 0: without a document."""
    shares = [share for groups in groups_of(plan, planner) for share in chain(*groups.shares)]
    return Counter(len(share.ranks) if share.shared or share.local else 0 for share in shares)


def microbatches_of(plan: Plan, planner: Any) -> tuple[list[list[int]], list[int]]:
    """(the number of microbatches with documents, by step and rank of the pool; the number of each step's program)."""
    steps = groups_of(plan, planner)
    counts = [groups.microbatches(1, 1) for groups in steps]
    return counts, [plan.program_of(step, len(groups.shares)) for step, groups in enumerate(steps)]


PLANNED = [
    {"sizes": {"dp": 2, "cp": 2}},
    pytest.param({"sizes": {"cp": 4}, "microbatches": 4}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "cp": 2}}, marks=slow),
    pytest.param({"sizes": {"tp": 2, "cp": 2}}, marks=slow),
    pytest.param({"sizes": {"dp": 2, "cp": 2}, "factor": 1.0}, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANNED)
def test_planned_groups_train_like_one_process(fleet: Fleet, tmp_path: Path, case: dict[str, Any]) -> None:
    plan = grouped_plan(tmp_path, **case)
    assert max(group_sizes(plan, hybrid)) > 1, "no ring proves nothing"
    assert_equals_one_process(fleet, plan, steps=STEPS)


RANDOM = [
    {
        **{"sizes": {"dp": 2, "cp": 2}, "factor": 4, "unit_layers": 1},
        **{"offload": 0.3, "recompute": "attention", "recompute_fraction": 0.5},
    },
    pytest.param({"sizes": {"dp": 4}, "microbatches": 3, "factor": 4}, marks=slow),
    pytest.param({"sizes": {"cp": 4}, "microbatches": 3, "factor": 4, "packing": "windows"}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "dp": 2}, "microbatches": 4, "factor": 3}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "cp": 2, "name": "zb-h1"}, "microbatches": 4, "factor": 4}, marks=slow),
    pytest.param(
        {"sizes": {"pp": 2, "cp": 2, "name": "zb-h2"}, "microbatches": 4, "factor": 4, "post_validation": True},
        marks=slow,
    ),
    pytest.param({"sizes": {"tp": 2, "dp": 2}, "microbatches": 3, "factor": 4}, marks=slow),
    pytest.param({"sizes": {"tp": 2, "dp": 2}, "microbatches": 3, "factor": 4, "logit_rows": 7}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "cp": 2}, "microbatches": 4, "factor": 4, "logit_rows": 7}, marks=slow),
    pytest.param({"sizes": {"dp": 4}, "factor": 4, "ramp": {1: 2}}, marks=slow),
    pytest.param({"sizes": {"dp": 4}, "factor": 4, "memory_options": MemoryOptions(zero=3)}, marks=slow),
    *(
        pytest.param({"sizes": {"dp": 2, "cp": 2}, "factor": 4, "recompute": mode}, marks=slow)
        for mode in ("full", "attention", "selective")
    ),
    *(
        pytest.param({"sizes": {"dp": 4}, "factor": 4, "model": FAMILIES[name]}, marks=slow, id=name)
        for name in ("gemma2", "gpt-oss", "mixtral", "deepseek-v2-lite", "mistral", "qwen3")
    ),
    *(pytest.param({"sizes": {"dp": 4}, "factor": 5, "seed": seed}, marks=slow) for seed in (2, 3, 4)),
    *(
        pytest.param({"sizes": {"dp": 2, "cp": 2}, "factor": 4, "unit_layers": 1, **given}, marks=slow)
        for given in (
            {"offload": 1.0},
            {"offload": 0.6, "memory_options": MemoryOptions(zero=3)},
            {"offload": 0.6, "model": FAMILIES["mixtral"], "recompute": "attention"},
        )
    ),
]


@pytest.mark.parametrize("case", RANDOM)
def test_any_groups_train_like_one_process(random_fleet: Fleet, tmp_path: Path, case: dict[str, Any]) -> None:
    plan = grouped_plan(tmp_path, **case)
    sizes, pool = group_sizes(plan, random_groups), plan.mesh.dp * plan.mesh.cp
    assert sizes.keys() - {0} == {*range(1, pool + 1)}
    assert_equals_one_process(random_fleet, plan, steps=STEPS)


UNEQUAL = [
    {"sizes": {"pp": 2, "dp": 2}},
    pytest.param({"sizes": {"dp": 4}}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "cp": 2, "name": "zb-h2"}, "post_validation": True}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "dp": 2, "name": "zb-v"}}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "dp": 2, "name": "interleaved"}, "longer": (6, 8)}, marks=slow),
    pytest.param({"sizes": {"tp": 2, "dp": 2}}, marks=slow),
    *(
        pytest.param({"sizes": {"pp": 2, "dp": 2}, "memory_options": MemoryOptions(zero=zero, **more)}, marks=slow)
        for zero, more in ((1, {}), (2, {"reduce": "microbatch"}), (3, {"max_gathered": 1}))
    ),
    pytest.param({"sizes": {"dp": 2, "pp": 2}, "unit_layers": 1, "recompute": "full", "offload": 0.6}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "cp": 2}, "model": FAMILIES["mixtral"]}, marks=slow),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", UNEQUAL)
def test_pipelines_of_unequal_numbers_of_microbatches_train_like_one_process(
    random_fleet: Fleet, tmp_path: Path, case: dict[str, Any]
) -> None:
    plan = grouped_plan(tmp_path, microbatches=4, factor=4, **{"longer": (5, 7), **case})
    counts, programs = microbatches_of(plan, random_groups)
    assert all(len({*each}) > 1 for each in counts) and any(programs), "equal numbers prove nothing"
    outcomes = assert_equals_one_process(random_fleet, plan, steps=STEPS)
    assert [[result.program for result in outcome.results] for outcome in outcomes] == [programs] * len(outcomes)


EXPERTS = [
    {"sizes": {"ep": 2, "pp": 2, "name": "zb-h2"}},
    pytest.param({"sizes": {"ep": 2}}, marks=slow),
    pytest.param({"sizes": {"ep": 4}}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "dp": 2}}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "cp": 2}, "packing": "windows"}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "tp": 2}}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "pp": 2, "name": "zb-v"}}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "pp": 2, "name": "zb-h2"}, "post_validation": True}, marks=slow),
    *(
        pytest.param({"sizes": {"ep": 2, "dp": 2}, "memory_options": MemoryOptions(zero=zero)}, marks=slow)
        for zero in (1, 2, 3)
    ),
    *(pytest.param({"sizes": {"ep": 2, "dp": 2}, "recompute": mode}, marks=slow) for mode in ("full", "attention")),
    pytest.param(
        {"sizes": {"ep": 2, "dp": 2}, "unit_layers": 1, "offload": 0.3, "recompute": "mlp", "recompute_fraction": 0.5},
        marks=slow,
    ),
    *(
        pytest.param({"sizes": {"ep": 2, "dp": 2}, "model": FAMILIES[name]}, marks=slow, id=name)
        for name in ("gpt-oss", "qwen3-moe")
    ),
    *(pytest.param({"sizes": {"ep": 2, "dp": 2}, "factor": 6, "seed": seed}, marks=slow) for seed in (2, 3, 4)),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", EXPERTS)
def test_ranks_that_exchange_tokens_of_experts_train_like_one_process(
    random_fleet: Fleet, tmp_path: Path, case: dict[str, Any]
) -> None:
    given = {"microbatches": 2, "factor": 4, "longer": (3, 4), "model": SHALLOW_MIXTRAL, **case}
    plan = grouped_plan(tmp_path, **given)
    steps, mesh = groups_of(plan, random_groups), plan.mesh
    run, own = ([each.microbatches(*sizes) for each in steps] for sizes in ((mesh.cp, mesh.ep), (1, 1)))
    assert run != own, "no rank without documents of its own proves nothing"
    outcomes = assert_equals_one_process(random_fleet, plan, steps=STEPS)
    _, programs = microbatches_of(plan, random_groups)
    assert [[result.program for result in outcome.results] for outcome in outcomes] == [programs] * len(outcomes)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"dp": 2, "cp": 2}, marks=slow),
        pytest.param({"dp": 2, "ep": 2}, marks=slow),
        {"pp": 2, "cp": 2},
        pytest.param({"pp": 2, "tp": 2, "name": "zb-v"}, marks=slow),
    ],
)
def test_a_run_with_groups_evaluates_like_one_process(fleet: Fleet, tmp_path: Path, sizes: dict[str, int]) -> None:
    plan = grouped_plan(tmp_path, sizes, model=SHALLOW_MIXTRAL)
    assert_evaluates_like_one_process(fleet, with_eval(plan, 5))


@slow
@pytest.mark.parametrize(
    "case",
    [
        {"sizes": {"dp": 2, "cp": 2}},
        {"sizes": {"dp": 2, "pp": 2}},
        {"sizes": {"dp": 2, "pp": 2}, "longer": (3, 5)},
        {"sizes": {"dp": 2, "pp": 2, "name": "zb-h2"}, "longer": (3, 5), "post_validation": True},
        {"sizes": {"ep": 2, "pp": 2, "name": "zb-h2"}, "longer": (3, 5), "model": FAMILIES["mixtral"]},
    ],
)
def test_runs_with_groups_resume_with_the_same_bits(random_fleet: Fleet, tmp_path: Path, case: dict[str, Any]) -> None:
    assert_repeatable(random_fleet, grouped_plan(tmp_path, factor=4, dtype="float32", **case), tmp_path)


@slow
@pytest.mark.timeout(150)
def test_a_run_with_groups_recovers_with_the_same_bits(workers: list[WorkerProcess], tmp_path: Path) -> None:
    plan = grouped_plan(tmp_path, {"dp": 2, "cp": 2}, dtype="float32")
    check_recovery(workers, plan, 16, signal.SIGKILL)


@slow
@pytest.mark.timeout(150)
def test_a_run_with_longer_steps_recovers_with_the_same_bits(workers: list[WorkerProcess], tmp_path: Path) -> None:
    plan = grouped_plan(tmp_path, {"dp": 2, "pp": 2}, dtype="float32", factor=1.0, microbatches=2, longer=(3, 4))
    counts, programs = microbatches_of(plan, hybrid)
    assert any(programs) and any(len({*each}) > 1 for each in counts)
    check_recovery(workers, plan, 16, signal.SIGKILL)


OFFLOADED = (0.0, 0.3, 0.6, 1.0)


@slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"pp": 2, "cp": 2}, {"dp": 4}])
def test_offloading_changes_no_bit_of_a_step_with_groups(
    random_fleet: Fleet, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Some microbatches stay on the device, others are offloaded."""
    given: dict[str, Any] = {"sizes": sizes, "factor": 4, "unit_layers": 1, "dtype": "float32"}
    plans = [grouped_plan(tmp_path / str(share), **given, offload=share) for share in OFFLOADED]
    steps = groups_of(plans[0], random_groups)
    held = [groups.tokens(share) / plans[0].batch.capacity for groups in steps for share in chain(*groups.shares)]
    assert min(filter(None, held)) < 0.4 < max(held), "what all stays, or all goes, proves less"
    runs = [random_fleet.run(plan, [(0, 1), (1, 1)]) for plan in plans]
    for plain, *others in zip(*runs, strict=True):
        for other in others:
            assert same_bits(plain.state, other.state)
            assert all(same_bits(*pair) for pair in zip(plain.gradients, other.gradients, strict=True))
            assert [each.losses for each in plain.results] == [each.losses for each in other.results]


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_what_stays_of_a_short_microbatch_is_no_more_than_of_a_full_one(tmp_path: Path, share: float) -> None:
    plan = grouped_plan(tmp_path, {"dp": 2, "cp": 2}, factor=4, unit_layers=1, offload=share)
    activations = ActivationOffload.of(with_slots(plan), 0, HostStreams(), torch.device("cpu"))
    full, capacity = movable_bytes(plan, plan.batch.capacity), plan.batch.capacity
    staying = [size - each.bytes for size, each in zip(full, cuts_of(plan), strict=True)]
    units = [unit for unit, fraction in enumerate(plan.offload) if fraction == share]
    assert len(units) >= plan.model.layers - 1
    for unit in units:
        kept = [number for number in range(1, capacity + 1) if activations.stays(unit, number)]
        assert kept == [*range(1, int((1 - share) * capacity) + 1)]
        assert all(movable_bytes(plan, tokens)[unit] <= staying[unit] for tokens in kept)


def movable_bytes(plan: Plan, tokens: int) -> list[int]:
    """The bytes that each unit saves of a microbatch of `tokens` tokens and could offload."""
    batch = replace(plan.batch, capacity=tokens)
    return [each.bytes for each in cuts_of(replace(plan, batch=batch, offload=()))]
