"""Searched orders are valid and within the memory capacity, and tabu search never makes the best one worse."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.search.list_scheduling import Rule, age_priority, in_flight_limits, list_schedule
from pentad.schedules.search.problem import (
    Objective,
    Problem,
    capacity_of,
    orders_of,
    peak_memory,
    step_ticks,
    streams_of,
    tails,
    times_of,
)
from pentad.schedules.search.search import Search, fuse
from pentad.schedules.search.tabu_search import improve
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.verify.check import check_order

NAMES = {("looped", 1): "1f1b", ("looped", 2): "interleaved", ("v", 2): "zb-v"}
PLACES = st.sampled_from(sorted(NAMES))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    kind = draw(PLACES)
    placed = generate(NAMES[kind], ranks, microbatches)
    values = st.integers(1, 9).map(float)
    f, b, w = (tuple(draw(values) for _ in range(placed.stages)) for _ in range(3))
    slow = tuple(draw(st.sampled_from([1.0, 1.5])) for _ in range(ranks))
    costs = Costs(f, b, w, draw(st.sampled_from([0.0, 1.0])), slowdown=slow)
    limit = draw(st.sampled_from([None, 1.0, 1.5, 2.0, 3.0]))
    capacity = capacity_of(limit, placed.chunks, microbatches)
    objective: Objective = "longest" if draw(st.booleans()) else "makespan"
    return Problem(placed.placement, microbatches, placed.chunks, costs, capacity, objective)


@st.composite
def rules(draw: st.DrawFn, problem: Problem) -> Rule:
    share = st.sampled_from([0.0, 0.5, 1.0])
    extra = draw(st.sampled_from([0.0, 1.0, inf]))
    return Rule(draw(share), draw(share), problem.capacity, in_flight_limits(problem, problem.capacity, extra))


def program_of(problem: Problem, orders: list[list[int]]) -> Program:
    streams = streams_of(problem, orders)
    return Program("searched", streams, problem.placement, problem.microbatches, problem.chunks)


@given(st.data(), problems())
def test_every_rule_gives_a_valid_order_within_the_capacity(data, problem):
    """Ranks never deadlock, even with the smallest capacity, one microbatch."""
    rule, stretch = data.draw(rules(problem)), data.draw(st.sampled_from([0.0, 1.0]))
    orders = list_schedule(problem, age_priority(problem, stretch), rule)
    check_order(program_of(problem, orders))
    assert all(peak_memory(problem, order) <= problem.capacity for order in orders)


@given(st.data(), problems())
def test_times_agree_with_those_of_the_program(data, problem):
    orders = list_schedule(problem, age_priority(problem, 0.0), data.draw(rules(problem)))
    program, timing = program_of(problem, orders), times_of(problem, orders)
    assert timing is not None
    times = compute_times(program, problem.costs)
    expected = max(spans[-1][1] - (spans[0][0] if problem.objective == "longest" else 0.0) for spans in times)
    assert problem.to_cost(step_ticks(problem, orders, timing.ends)) == pytest.approx(expected)
    peaks = [most / 2 / problem.chunks for most in (peak_memory(problem, order) for order in orders)]
    assert peaks == pytest.approx(peak_activations(program))


@given(st.data(), problems())
def test_end_and_tail_of_a_critical_operation_add_up_to_the_step(data, problem):
    orders = list_schedule(problem, age_priority(problem, 0.0), data.draw(rules(problem)))
    timing = times_of(problem, orders)
    assert timing is not None
    through = [end + after for end, after in zip(timing.ends, tails(problem, orders, timing.sequence), strict=True)]
    assert max(through) == step_ticks(problem, orders, timing.ends)


@given(st.data(), problems())
def test_tabu_search_keeps_orders_valid_and_never_makes_them_longer(data, problem):
    orders = list_schedule(problem, age_priority(problem, 0.0), data.draw(rules(problem)))
    timing = times_of(problem, orders)
    assert timing is not None
    found = improve(problem, orders, 60)
    assert found.ticks <= step_ticks(problem, orders, timing.ends)
    check_order(program_of(problem, found.orders))
    assert all(peak_memory(problem, order) <= problem.capacity for order in found.orders)
    for order in found.orders:
        weights = [each for each in order if each >= 2 * problem.stages * problem.microbatches]
        for stage in range(problem.stages):
            of = [each for each in weights if each // problem.microbatches % problem.stages == stage]
            assert of == sorted(of)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half", "interleaved"])
def test_a_search_can_start_from_a_schedule_of_the_catalogue(name):
    program = generate(name, 4, 8)
    costs = Costs.uniform(program.stages, chunks=program.chunks, transfer=0.1)
    capacity = capacity_of(None, program.chunks, 8)
    problem = Problem(program.placement, 8, program.chunks, costs, capacity)
    search = Search(problem, 0, [])
    search.add(name, orders_of(problem, program.streams))
    search.tabu_search(200 * problem.operations)
    makespan = max(spans[-1][1] for spans in compute_times(program, costs))
    assert search.cost <= makespan * (1 + 1e-9)
    assert orders_of(problem, streams_of(problem, search.best[0].orders)) == search.best[0].orders


def test_ranks_that_wait_for_one_another_forever_have_no_times():
    program = generate("zb-h1", 2, 2)
    problem = Problem(program.placement, 2, 1, Costs.uniform(2), capacity_of(None, 1, 2))
    orders = orders_of(problem, program.streams)
    orders[0].sort(key=lambda each: each // 4 != 1)  # every B before its F
    assert times_of(problem, orders) is None


def test_a_b_and_the_w_that_follows_it_become_a_bw():
    streams = generate("zb-v", 2, 4).streams
    first, all_stages = fuse(streams, range(1)), fuse(streams, range(4))
    ops = [[part.op for stream in each for part in instructions_of(stream)] for each in (first, all_stages)]
    assert 0 < ops[0].count(Op.BW) < ops[1].count(Op.BW)
    assert all(2 * each.count(Op.BW) + each.count(Op.B) + each.count(Op.W) == 32 for each in ops)
    check_order(Program("fused", all_stages, generate("zb-v", 2, 4).placement, 4, 2))
