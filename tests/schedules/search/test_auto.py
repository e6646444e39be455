"""The chosen schedule is as fast as any within the limit, and no faster than its bound."""

from __future__ import annotations

import pytest
from auto_table import CASES, Case, row
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_sizes import allows

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.catalogue import CATALOGUE, NO_OPTIONS, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import Candidate, choose, describe
from pentad.schedules.search.bounds import lower_bound
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleOptions

COSTS = st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.2, 2), st.floats(0, 0.3))
LITTLE = 60_000  # search effort in tests
QUICK = [case for case in CASES if case.ranks * case.microbatches <= 64]


def costs_of(each: tuple[float, float, float, float]):
    f, b, w, transfer = each
    return lambda placed: Costs.uniform(placed.stages, f, b, w, chunks=placed.chunks, transfer=transfer)


def uneven(placed: Program) -> Costs:
    """Costs with an LM head half as expensive as a rank's layers, and with a slow rank."""
    f = [1 / placed.chunks] * placed.stages
    f[-1] += 0.5
    slowdown = (1.0,) * (placed.ranks - 1) + (1.25,)
    return Costs(tuple(f), tuple(f), tuple(f), 0.02, slowdown=slowdown)


def length(program: Program, costs: Costs, objective: str = "makespan") -> float:
    times = compute_times(program, costs)
    if objective == "longest":
        return max(spans[-1][1] - spans[0][0] for spans in times)
    return max(spans[-1][1] for spans in times) - min(spans[0][0] for spans in times)


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 12), COSTS, st.one_of(st.none(), st.floats(2, 9)))
def test_no_schedule_of_the_catalogue_within_the_limit_is_faster(ranks, microbatches, each, limit):
    of = costs_of(each)
    choice = choose(ranks, microbatches, of, ScheduleOptions(memory_limit=limit), effort=LITTLE // 10, two_copies=True)
    for name in CATALOGUE:
        if not allows(name, ranks, microbatches):
            continue
        costs = of(generate(name, ranks, microbatches))
        program = generate(name, ranks, microbatches, NO_OPTIONS, costs)
        if limit is None or max(peak_activations(program)) <= limit:
            assert choice.best.makespan <= length(program, costs) * (1 + 1e-9)


@given(st.data(), st.integers(1, 6), st.integers(1, 14), COSTS, st.sampled_from(["makespan", "longest"]))
def test_no_order_is_faster_than_the_bound_of_its_placement(data, ranks, microbatches, each, objective):
    names = [name for name in CATALOGUE if CATALOGUE[name].slices == 1 and allows(name, ranks, microbatches)]
    name = data.draw(st.sampled_from(names))
    stages = generate(name, ranks, microbatches).stages
    f, b, w = (tuple(value * data.draw(st.floats(0.5, 2)) for _ in range(stages)) for value in each[:3])
    slowdown = tuple(data.draw(st.floats(0.8, 1.5)) for _ in range(ranks)) if data.draw(st.booleans()) else ()
    launch = data.draw(st.sampled_from([0.0, 0.1]))
    costs = Costs(f, b, w, each[3], launch=launch, slowdown=slowdown)
    program = generate(name, ranks, microbatches, NO_OPTIONS, costs)
    limit = data.draw(st.sampled_from([None, max(peak_activations(program))]))
    assert length(program, costs, objective) >= lower_bound(program, costs, limit, objective).time * (1 - 1e-9)


@pytest.mark.parametrize(("name", "bound"), [("1f1b", 27), ("zb-h1", 27), ("zb-v", 25.5), ("gpipe", 27)])
def test_zb_h1_and_zb_v_meet_the_bounds_of_their_placements(name, bound):
    """p=4, m=8, equal costs."""
    program = generate(name, 4, 8)
    costs = Costs.uniform(program.stages, chunks=program.chunks)
    assert lower_bound(program, costs).time == pytest.approx(bound)
    if name.startswith("zb"):
        assert length(program, costs) == pytest.approx(bound)


def test_zb_h1_is_the_fastest_in_the_memory_of_1f1b():
    """p=4, m=8, transfer 0.1: with four microbatches in memory, no order of one stage per rank is faster."""
    costs = Costs.uniform(4, transfer=0.1)
    program = generate("zb-1p", 4, 8, NO_OPTIONS, costs)
    bound = lower_bound(program, costs, 4.0)
    assert length(program, costs) == pytest.approx(bound.time)
    assert "after 4 of F" in bound.why


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
def test_bounds_depend_on_memory(limit):
    program = generate("1f1b", 4, 16)
    costs = Costs.uniform(4)
    assert lower_bound(program, costs, limit).time > 1.15 * lower_bound(program, costs).time
    assert "has room for" in lower_bound(program, costs, limit).why


@pytest.mark.sampled(1)
@pytest.mark.parametrize("objective", ["makespan", "longest"])
@pytest.mark.parametrize("limit", [4.0, 5.0, 2.5])
def test_with_uneven_costs_the_search_beats_the_catalogue(objective, limit):
    choice = choose(4, 12, uneven, ScheduleOptions(memory_limit=limit), objective, LITTLE, two_copies=False)
    best, known = choice.best, choice.best_known
    assert known is not None and getattr(best, objective) < getattr(known, objective) * 0.999
    assert max(peak_activations(best.program)) <= limit + 1e-9
    assert "searched from" in describe(choice) and "% faster than" in describe(choice)
    assert choice.least_bound.time <= choice.bound.time <= getattr(best, objective) * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [None, 2.0, 3.0])
@pytest.mark.parametrize("gated", [False, True])
def test_a_searched_order_compiles_and_is_saved_like_any_other(limit, gated):
    choice = choose(3, 6, uneven, ScheduleOptions(memory_limit=limit), effort=LITTLE, two_copies=False)
    order = choice.best.program
    program = compile_program(order.name, 3, 6, costs=uneven(order), gated=gated, replicas=2, order=order)
    assert program.compute().streams == order.streams
    assert Program.from_bytes(program.to_bytes()).hash == program.hash


def test_orders_that_hold_parameters_twice_have_to_gain_what_updating_them_takes():
    """DualPipe is the fastest here (p=4, m=16, a costly head) only if optimizer updates are free."""

    def best(step: float) -> Candidate:
        def of(placed: Program) -> Costs:
            f = [1 / placed.chunks] * placed.stages
            f[-1] += 0.2
            held_twice = sum(map(len, placed.placement)) > placed.stages
            return Costs(tuple(f), tuple(f), tuple(f), 0.02, step=step * (1 + held_twice))

        return choose(4, 16, of, effort=0).best

    free, costly = best(0.0), best(10.0)
    assert (free.name, costly.name != "dualpipe") == ("dualpipe", True)
    assert free.makespan < costly.makespan


def test_the_same_question_has_the_same_answer():
    first, then = (choose(3, 9, uneven, ScheduleOptions(memory_limit=3), effort=LITTLE).best for _ in range(2))
    assert first.program.hash == then.program.hash


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_realistic_cases_gain_where_they_should(case: Case):
    found = row(case, effort=4 * LITTLE)
    assert found["gain_percent"] >= (1e-3 if case.gains else -1e-9)
    assert found["gap_percent"] >= 0


@pytest.mark.parametrize("limit", [0.5, 0.0, -1.0, float("nan")])
def test_a_limit_below_one_microbatch_is_refused(limit):
    with pytest.raises(PentadError, match=r"^schedule auto: memory_limit is .*: expected at least 1$"):
        choose(4, 8, costs_of((1.0, 1.0, 1.0, 0.0)), ScheduleOptions(memory_limit=limit))


@pytest.mark.parametrize("option", ["chunks", "group"])
def test_options_that_auto_chooses_are_refused(option):
    with pytest.raises(PentadError, match=f"{option} is 3, but schedule auto chooses it: expected no {option}$"):
        load(None, ["schedule.name=auto", f"schedule.{option}=3"])


def test_fewer_layers_than_ranks_are_refused():
    with pytest.raises(PentadError, match=r"model\.layers is 3: expected at least one for each of 4 pipeline stages"):
        load(None, ["schedule.name=auto", "model.layers=3"])


def test_a_run_takes_a_schedule_whose_stages_all_have_layers():
    plan = make_plan(load(None, ["schedule.name=auto", "model.layers=9"]), "cpu")
    assert plan.program.stages <= 9
    assert make_plan(load(None, ["schedule.name=auto", "model.layers=9"]), "cpu").program.hash == plan.program.hash


def test_a_run_respects_its_memory_limit():
    plan = make_plan(load(None, ["schedule.name=auto", "schedule.memory_limit=3.5"]), "cpu")
    assert max(peak_activations(plan.program)) <= 3.5 + 1e-9


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("objective", ["makespan", "longest"])
def test_the_bound_counts_one_launch_for_a_bw(name, objective):
    program = generate(name, 2, 4)
    costs = Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, launch=0.1)
    assert length(program, costs, objective) >= lower_bound(program, costs, None, objective).time * (1 - 1e-9)


def test_the_path_of_one_microbatch_ends_with_one_launch():
    program, costs = generate("gpipe", 1, 1), Costs((1.0,), (1.0,), (1.0,), launch=0.1)
    assert length(program, costs) == pytest.approx(lower_bound(program, costs).time) == pytest.approx(3.2)
