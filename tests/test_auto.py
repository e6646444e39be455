"""The schedule that is chosen is as quick as any that keeps to the limit, and no quicker than its bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import allows

from pentad.orchestrator.config import load
from pentad.orchestrator.planning import make_plan
from pentad.schedules.auto import choose, lower_bound
from pentad.schedules.catalogue import CATALOGUE, NONE, generate
from pentad.schedules.check import peak_activations
from pentad.schedules.costs import Costs
from pentad.schedules.errors import PentadError
from pentad.schedules.order import compute_times
from pentad.schedules.program import Program
from pentad.schedules.shape import Options

COSTS = st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.2, 2), st.floats(0, 0.3))


def costs_of(each: tuple[float, float, float, float]):
    f, b, w, transfer = each
    return lambda placed: Costs.uniform(placed.stages, f, b, w, chunks=placed.chunks, transfer=transfer)


def makespan(program: Program, costs: Costs) -> float:
    times = compute_times(program, costs)
    return max(spans[-1][1] for spans in times) - min(spans[0][0] for spans in times)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 12), COSTS, st.one_of(st.none(), st.floats(2, 9)))
def test_no_schedule_of_the_catalogue_that_keeps_to_the_limit_is_quicker(ranks, microbatches, each, limit):
    of = costs_of(each)
    choice = choose(ranks, microbatches, of, Options(limit=limit))
    for name in CATALOGUE:
        if not allows(name, ranks, microbatches):
            continue
        costs = of(generate(name, ranks, microbatches))
        program = generate(name, ranks, microbatches, NONE, costs)
        if limit is None or max(peak_activations(program)) <= limit:
            assert choice.best.makespan <= makespan(program, costs) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 6), st.integers(1, 14), COSTS)
def test_no_order_is_quicker_than_the_bound_of_its_placement(data, ranks, microbatches, each):
    names = [name for name in CATALOGUE if allows(name, ranks, microbatches)]
    name = data.draw(st.sampled_from(names))
    stages = generate(name, ranks, microbatches).stages
    f, b, w = (tuple(value * data.draw(st.floats(0.5, 2)) for _ in range(stages)) for value in each[:3])
    costs = Costs(f, b, w, each[3])
    program = generate(name, ranks, microbatches, NONE, costs)
    assert makespan(program, costs) >= lower_bound(program, costs) * (1 - 1e-9)


@pytest.mark.parametrize(("name", "bound"), [("1f1b", 27), ("zb-h1", 27), ("zb-v", 25.5), ("gpipe", 27)])
def test_the_bound_is_met_by_the_schedules_that_have_no_better(name, bound):
    """p=4, m=8, equal costs: ZB-H1 and ZB-V are the quickest of their placements."""
    program = generate(name, 4, 8)
    costs = Costs.uniform(program.stages, chunks=program.chunks)
    assert lower_bound(program, costs) == pytest.approx(bound)
    if name.startswith("zb"):
        assert makespan(program, costs) == pytest.approx(bound)


@pytest.mark.parametrize("limit", [0.5, 0.0, -1.0, float("nan")])
def test_a_limit_below_one_microbatch_is_refused(limit):
    with pytest.raises(PentadError, match=r"^schedule auto: memory_limit is .*, but at least 1 is needed$"):
        choose(4, 8, costs_of((1.0, 1.0, 1.0, 0.0)), Options(limit=limit))


@pytest.mark.parametrize("option", ["chunks", "group"])
def test_what_it_chooses_itself_cannot_be_asked_for(option):
    with pytest.raises(PentadError, match=f"{option} is 3, but schedule auto chooses it, wanted no {option}$"):
        load(None, ["schedule.name=auto", f"schedule.{option}=3"])


def test_fewer_layers_than_ranks_are_refused():
    with pytest.raises(PentadError, match=r"model\.layers is 3, but 4 pipeline stages"):
        load(None, ["schedule.name=auto", "model.layers=3"])


def test_a_run_takes_the_quickest_schedule_whose_stages_have_layers():
    plan = make_plan(load(None, ["schedule.name=auto", "model.layers=9"]), "cpu")
    assert plan.program.stages <= 9
    assert make_plan(load(None, ["schedule.name=auto", "model.layers=9"]), "cpu").program.hash == plan.program.hash


def test_a_run_keeps_to_its_limit():
    plan = make_plan(load(None, ["schedule.name=auto", "schedule.memory_limit=3.5"]), "cpu")
    assert max(peak_activations(plan.program)) <= 3.5
