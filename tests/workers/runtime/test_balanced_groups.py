"""Experts are balanced over the tokens of each data-aware group, whichever of its ranks have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_families
import torch
from exactness import assert_equals_one_process
from fleet import Fleet
from group_reference import groups_of, reference_of_groups, sets_of
from plans import STEPS, global_batches, is_close
from random_groups import grouped_plan, random_groups
from resume import assert_repeatable, run_and_save
from small_models import FAMILIES, MOE

from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.shards import read
from pentad.workers.params.param_init import initial_values
from pentad.workers.runtime.results import total_load

slow = pytest.mark.slow


def with_losses(model: ModelSpec, without: str = "") -> ModelSpec:
    """`model` with all ways to balance experts but `without`, strong enough for each to be seen."""
    assert model.experts is not None
    weights: dict[str, Any] = {"aux_loss_coef": 0.5, "router_z_loss_coef": 0.1, "bias_update_rate": 0.05}
    return replace(model, experts=replace(model.experts, **{key: weights[key] * (key != without) for key in weights}))


CASES = [
    {"sizes": {"dp": 2, "cp": 2}, "model": with_losses(replace(MOE, layers=2))},
    {"sizes": {"ep": 2, "cp": 2}, "model": with_losses(replace(MOE, layers=2))},
    pytest.param({"sizes": {"dp": 4}, "microbatches": 3, "factor": 4, "packing": "windows"}, marks=slow),
    pytest.param({"sizes": {"ep": 4}}, marks=slow),
    pytest.param({"sizes": {"ep": 2, "dp": 2}, "longer": (3, 5)}, marks=slow),
    pytest.param({"sizes": {"tp": 2, "dp": 2}, "microbatches": 3}, marks=slow),
    pytest.param({"sizes": {"tp": 2, "ep": 2}}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "dp": 2, "name": "zb-h2"}, "microbatches": 4, "longer": (5, 7)}, marks=slow),
    pytest.param({"sizes": {"pp": 2, "ep": 2, "name": "zb-v"}, "microbatches": 4}, marks=slow),
    pytest.param({"sizes": {"dp": 4}, "ramp": {1: 2}, "longer": (3, 4)}, marks=slow),
    pytest.param({"sizes": {"dp": 2, "cp": 2}, "memory_options": MemoryOptions(zero=3)}, marks=slow),
    *(
        pytest.param({"sizes": {"dp": 2, "cp": 2}, "recompute": mode}, marks=slow)
        for mode in ("full", "attention", "selective", "moe")
    ),
    pytest.param({"sizes": {"ep": 2, "dp": 2}, "recompute": "full"}, marks=slow),
    pytest.param({"sizes": {"dp": 2, "cp": 2}, "unit_layers": 1, "offload": 0.6}, marks=slow),
    *(
        pytest.param({"sizes": sizes, "model": with_losses(FAMILIES[name])}, marks=slow, id=f"{name}-{sizes}")
        for name in ("gpt-oss", "mixtral", "deepseek-v3")
        for sizes in ({"dp": 4}, {"ep": 2, "dp": 2})
    ),
    *(pytest.param({"sizes": {"dp": 2, "cp": 2}, "seed": seed}, marks=slow) for seed in (2, 3, 4)),
]


@pytest.mark.parametrize("case", CASES)
def test_any_groups_balance_experts_like_one_process(random_fleet: Fleet, tmp_path: Path, case: dict[str, Any]) -> None:
    plan = grouped_plan(tmp_path, **{"model": with_losses(MOE), "factor": 4, **case})
    assert any(len(share.ranks) > 1 for groups in groups_of(plan, random_groups) for share in groups.shares[0])
    assert_equals_one_process(random_fleet, plan, reference_of_groups(plan, random_groups))


@slow
@pytest.mark.parametrize("key", ["aux_loss_coef", "router_z_loss_coef", "bias_update_rate"])
def test_each_way_to_balance_is_seen(tmp_path: Path, key: str) -> None:
    """Without it one process trains differently; if not, the tests above would prove nothing about it."""
    plan = grouped_plan(tmp_path, {"dp": 2, "cp": 2}, factor=4, model=with_losses(MOE))
    without = replace(plan, model=with_losses(MOE, key))
    found, expected = (reference_of_groups(each, random_groups) for each in (without, plan))
    weights = {name: weight for name, weight in expected[3].items() if not name.endswith("experts.bias")}
    assert any(not is_close(found[3][name], weight, 1e-6) for name, weight in weights.items())


@slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"ep": 2, "dp": 2}])
def test_planned_groups_balance_experts_like_one_process(fleet: Fleet, tmp_path: Path, sizes: dict[str, int]) -> None:
    plan = grouped_plan(tmp_path, sizes, model=with_losses(MOE), microbatches=4)
    assert_equals_one_process(fleet, plan, reference_of_groups(plan, hybrid))


@slow
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"ep": 2, "cp": 2}, {"tp": 2, "dp": 2}])
def test_squares_and_loads_are_those_of_documents(random_fleet: Fleet, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Padding does not count."""
    plan = grouped_plan(tmp_path, sizes, factor=4, model=with_losses(MOE))
    outcomes = random_fleet.run(plan, [(0, 1)])
    batch, p = global_batches(plan)[0], initial_weights(plan)
    routes = reference_families.routes(plan.model, p, batch.inputs, batch.following, batch.documents)
    assert plan.model.experts is not None
    counted = sets_of(groups_of(plan, random_groups)[0], *batch.inputs.shape).flatten() >= 0
    squares = float(torch.stack([each.squared_lse[counted].sum() for each in routes]).sum())
    assert [each.results[0].router_squared_lse for each in outcomes] == pytest.approx([squares] * 4, rel=1e-10)
    loads = [
        reference_families.load(plan.model.experts, each._replace(chosen=each.chosen[counted])).tolist()
        for each in routes
    ]
    found = total_load(outcome.results[0].expert_load for outcome in outcomes)
    assert [list(found[layer]) for layer in sorted(found)] == loads


def initial_weights(plan: Plan) -> dict[str, torch.Tensor]:
    return {each.name: initial_values(each, plan.seed).double() for each in tensors(plan.model)}


@slow
def test_biases_move_as_in_one_process(random_fleet: Fleet, tmp_path: Path) -> None:
    plan = grouped_plan(tmp_path, {"ep": 2, "cp": 2}, factor=4, model=with_losses(MOE))
    folder = checkpoint.folder_of(tmp_path / "saved", STEPS)
    run_and_save(random_fleet, plan, STEPS, folder)
    expected = reference_of_groups(plan, random_groups)[3]
    names = [name for name in expected if name.endswith("experts.bias")]
    found = read(checkpoint.open_checkpoint(folder), [f"model.{name}" for name in names])
    assert names and all(expected[name].any() for name in names)
    for name in names:
        assert torch.allclose(found[f"model.{name}"].double(), expected[name], rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"ep": 2, "dp": 2}])
def test_runs_with_balanced_groups_resume_with_the_same_bits(
    random_fleet: Fleet, tmp_path: Path, sizes: dict[str, int]
) -> None:
    plan = grouped_plan(tmp_path, sizes, factor=4, dtype="float32", model=with_losses(MOE))
    assert_repeatable(random_fleet, plan, tmp_path)
