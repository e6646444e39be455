"""Law 1 for every axis, pair and triple of axes, and every schedule with experts under every ZeRO stage.

All are slow; test_axes.py has a selection that always runs. Models have experts unless stated otherwise.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from exactness import assert_equals_one_process
from fleet import Fleet
from plans import plan_on_mesh
from small_models import HEADS, MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
AXES = ("dp", "pp", "cp", "tp", "ep")
SCHEDULES = ("1f1b", "zb-h2", "zb-v", "dualpipe", "dualpipev")
SINGLES = [{axis: size} for axis in AXES for size in (2, 4)]
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(AXES, 2)]
TRIPLES = [dict.fromkeys(triple, 2) for triple in combinations(AXES, 3)]


def mesh_id(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


def schedule_for(sizes: dict[str, int]) -> str:
    return "zb-h2" if "pp" in sizes else "gpipe"


@pytest.fixture(scope="module")
def eight_ranks():
    fleet = Fleet(8)
    yield fleet
    fleet.stop()


@pytest.mark.parametrize("sizes", SINGLES, ids=mesh_id)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "experts"])
def test_one_axis(fleet, corpus, sizes, dense):
    if dense and "ep" in sizes:
        pytest.skip("a dense model has no experts")
    model = HEADS if dense else MOE
    assert_equals_one_process(fleet, plan_on_mesh(corpus, schedule_for(sizes), sizes, model=model))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_every_context_parallel_method(fleet, corpus, method, size):
    assert_equals_one_process(fleet, plan_on_mesh(corpus, "1f1b", {"cp": size}, model=HEADS, cp_method=method))


@pytest.mark.parametrize("sizes", PAIRS, ids=mesh_id)
def test_two_axes(fleet, corpus, sizes):
    assert_equals_one_process(fleet, plan_on_mesh(corpus, schedule_for(sizes), sizes, model=MOE))


@pytest.mark.parametrize("sizes", TRIPLES, ids=mesh_id)
def test_three_axes(eight_ranks, corpus, sizes):
    assert_equals_one_process(eight_ranks, plan_on_mesh(corpus, schedule_for(sizes), sizes, model=MOE))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_experts_and_zero(fleet, corpus, name, zero):
    options = MemoryOptions(zero=zero)
    plan = plan_on_mesh(corpus, name, {"ep": 2, "pp": 2}, model=MOE, memory_options=options)
    assert_equals_one_process(fleet, plan)


@pytest.mark.parametrize("recompute", ["selective", "attention", "full"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_recomputation(fleet, corpus, name, recompute):
    plan = plan_on_mesh(corpus, name, {"ep": 2, "pp": 2}, model=MOE, recompute=recompute)
    assert_equals_one_process(fleet, plan)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_over_replicas_of_experts(eight_ranks, corpus, zero):
    sizes, options = {"dp": 2, "ep": 2, "tp": 2}, MemoryOptions(zero=zero)
    assert_equals_one_process(eight_ranks, plan_on_mesh(corpus, "1f1b", sizes, model=MOE, memory_options=options))
