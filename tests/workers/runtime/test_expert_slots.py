"""Tokens that travel to their experts in slots: law 1, and steps that are run again with more slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import assert_same_runs
from evaluations import assert_evaluates_like_one_process, with_eval
from exactness import assert_equals_one_process
from plans import plan_on_mesh
from rank_checks import assert_a_check_changes_nothing
from small_models import FAMILIES, MOE
from worker_processes import WorkerProcess, call_all, ranks_of, recover, start_run

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

slow = pytest.mark.slow
FEW = 1
MESHES = [
    ("1f1b", {"ep": 2, "dp": 2}, {"memory_options": MemoryOptions(zero=3)}),
    pytest.param("1f1b", {"ep": 4}, {}, marks=slow),
    pytest.param("zb-h2", {"ep": 2, "pp": 2}, {}, marks=slow),
    pytest.param("dualpipe", {"ep": 2, "pp": 2}, {}, marks=slow),
    pytest.param("zb-v", {"ep": 2, "pp": 2}, {"recompute": "full"}, marks=slow),
    pytest.param("1f1b", {"ep": 2, "tp": 2}, {"memory_options": MemoryOptions(zero=1)}, marks=slow),
    pytest.param("gpipe", {"ep": 2, "cp": 2}, {}, marks=slow),
]


def plan_with(corpus: str, name: str, sizes: dict[str, int], slots: int, family: str = "", **more: object) -> Plan:
    """A plan with this many slots (0: enough for all tokens), and with two layers under 1f1b, otherwise four."""
    model = replace(FAMILIES[family] if family else MOE, layers=2 if name == "1f1b" else 4)
    plan = plan_on_mesh(corpus, name, sizes, model=model, **more)
    return replace(plan, expert_slots=slots or plan.slice_tokens)


@pytest.mark.parametrize("slots", [FEW, pytest.param(0, marks=slow)])
@pytest.mark.parametrize(("name", "sizes", "more"), MESHES)
def test_slots_give_the_numbers_of_one_process(fleet, corpus, name, sizes, more, slots):
    """With too few slots, steps are run again until there are enough."""
    plan = plan_with(corpus, name, sizes, slots, **more)
    outcomes = assert_equals_one_process(fleet, plan)
    ended_with = {result.expert_slots for outcome in outcomes for result in outcome.results}
    assert max(ended_with) <= plan.slice_tokens
    assert (min(ended_with) > FEW) if slots else ended_with == {plan.slice_tokens}


@slow
@pytest.mark.parametrize(("name", "sizes"), [("1f1b", {"ep": 2, "dp": 2}), ("dualpipe", {"ep": 2, "pp": 2})])
def test_steps_that_are_run_again_change_no_bit(fleet, corpus, name, sizes):
    """Nor in DeepSeek-V3's router biases, which follow the load: they are as with enough slots, or without slots."""
    calls, more = [(0, 2), (2, 3)], {"dtype": "float32"}
    few, enough = (plan_with(corpus, name, sizes, slots, "deepseek-v3", **more) for slots in (FEW, 0))
    expected = fleet.run(enough, calls)
    for plan in (few, replace(enough, expert_slots=0)):
        assert_same_runs(fleet.run(plan, calls), expected)


def test_evaluations_have_room_for_all_tokens(fleet, corpus):
    plan = plan_with(corpus, "1f1b", {"ep": 2, "pp": 2}, FEW)
    assert_evaluates_like_one_process(fleet, with_eval(plan, 21))


def test_a_repaired_generation_keeps_its_slots(rank_processes: list[WorkerProcess], corpus: str) -> None:
    """So does the rank that replaces the lost one."""
    plan = plan_with(corpus, "1f1b", {"ep": 2, "dp": 2}, FEW)
    with ranks_of(rank_processes, 4) as ranks:
        start_run(ranks, plan)
        grown = {result.expert_slots for results in call_all(ranks, "run", 0, 2) for result in results[1:]}
        version, _ = recover(ranks, [1], plan, 2)
        results = call_all(ranks, "run", version, 1)
        call_all(ranks, "close")
    assert version == 2
    assert {each[0].expert_slots for each in results} == grown
    assert min(grown) > FEW


@slow
def test_a_search_for_flipped_bits_leaves_slots_as_they_are(workers, corpus):
    """What it replays belongs to no step."""
    plan = plan_with(corpus, "1f1b", {"ep": 2, "dp": 2}, FEW, dtype="float32")
    assert_a_check_changes_nothing(workers, plan, 3)
