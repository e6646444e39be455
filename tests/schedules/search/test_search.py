"""What the search orders is valid, keeps to its room, and moves never make the best worse."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.ir.instruction import Op, units_of
from pentad.schedules.ir.program import Program
from pentad.schedules.search.search import Search, fused
from pentad.schedules.search.search_list import Rule, by_age, caps_of, listed
from pentad.schedules.search.search_moves import improved
from pentad.schedules.search.search_problem import (
    By,
    Problem,
    length,
    orders_of,
    peak,
    room_of,
    streams_of,
    tails,
    timed,
)
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.verify.check import check_order, peak_activations

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
    costs = Costs(f, b, w, draw(st.sampled_from([0.0, 1.0])), slow=slow)
    limit = draw(st.sampled_from([None, 1.0, 1.5, 2.0, 3.0]))
    room = room_of(limit, placed.chunks, ranks, microbatches)
    by: By = "longest" if draw(st.booleans()) else "makespan"
    return Problem(placed.placement, microbatches, placed.chunks, costs, room, by)


@st.composite
def rules(draw: st.DrawFn, problem: Problem) -> Rule:
    share = st.sampled_from([0.0, 0.5, 1.0])
    more = draw(st.sampled_from([0.0, 1.0, inf]))
    return Rule(draw(share), draw(share), problem.room, caps_of(problem, problem.room, more))


def program_of(problem: Problem, orders: list[list[int]]) -> Program:
    streams = streams_of(problem, orders)
    return Program("searched", streams, problem.placement, problem.microbatches, problem.chunks)


@settings(max_examples=60)
@given(st.data(), problems())
def test_every_rule_gives_a_valid_order_in_the_room(data, problem):
    """No ranks wait for one another however little room there is, one microbatch a rank at the least."""
    rule, stretch, lag = (
        data.draw(rules(problem)),
        data.draw(st.sampled_from([0.0, 1.0])),
        data.draw(st.sampled_from([1.0, inf])),
    )
    orders = listed(problem, by_age(problem, stretch, lag), rule)
    check_order(program_of(problem, orders))
    assert all(peak(problem, order) <= room for order, room in zip(orders, problem.room, strict=True))


@settings(max_examples=40)
@given(st.data(), problems())
def test_times_are_those_of_the_program(data, problem):
    orders = listed(problem, by_age(problem, 0.0, inf), data.draw(rules(problem)))
    program, timing = program_of(problem, orders), timed(problem, orders)
    assert timing is not None
    times = compute_times(program, problem.costs)
    expected = max(spans[-1][1] - (spans[0][0] if problem.by == "longest" else 0.0) for spans in times)
    assert problem.span(length(problem, orders, timing.ends)) == pytest.approx(expected)
    peaks = [most / 2 / problem.chunks for most in (peak(problem, order) for order in orders)]
    assert peaks == pytest.approx(peak_activations(program))


@settings(max_examples=30)
@given(st.data(), problems())
def test_head_and_tail_of_a_critical_operation_are_the_whole_step(data, problem):
    orders = listed(problem, by_age(problem, 0.0, inf), data.draw(rules(problem)))
    timing = timed(problem, orders)
    assert timing is not None
    through = [end + after for end, after in zip(timing.ends, tails(problem, orders, timing.sequence), strict=True)]
    assert max(through) == length(problem, orders, timing.ends)


@settings(max_examples=40)
@given(st.data(), problems())
def test_moves_keep_the_order_valid_and_never_lose(data, problem):
    orders = listed(problem, by_age(problem, 0.0, inf), data.draw(rules(problem)))
    timing = timed(problem, orders)
    assert timing is not None
    found = improved(problem, orders, 60)
    assert found.ticks <= length(problem, orders, timing.ends)
    check_order(program_of(problem, found.orders))
    assert all(peak(problem, order) <= room for order, room in zip(found.orders, problem.room, strict=True))
    for order in found.orders:
        weights = [each for each in order if each >= 2 * problem.stages * problem.microbatches]
        for stage in range(problem.stages):
            of = [each for each in weights if each // problem.microbatches % problem.stages == stage]
            assert of == sorted(of)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half", "interleaved"])
def test_a_schedule_of_the_catalogue_is_where_a_search_starts(name):
    program = generate(name, 4, 8)
    costs = Costs.uniform(program.stages, chunks=program.chunks, transfer=0.1)
    room = room_of(None, program.chunks, 4, 8)
    problem = Problem(program.placement, 8, program.chunks, costs, room)
    search = Search(problem, 0, [])
    search.start(name, program.streams)
    search.moves(200 * problem.size)
    makespan = max(spans[-1][1] for spans in compute_times(program, costs))
    assert search.span <= makespan * (1 + 1e-9)
    assert orders_of(problem, streams_of(problem, search.best[0].orders)) == search.best[0].orders


def test_ranks_that_wait_for_one_another_have_no_times():
    program = generate("zb-h1", 2, 2)
    problem = Problem(program.placement, 2, 1, Costs.uniform(2), room_of(None, 1, 2, 2))
    orders = orders_of(problem, program.streams)
    orders[0].sort(key=lambda each: each // 4 != 1)  # every B before its F
    assert timed(problem, orders) is None


def test_b_and_w_that_meet_are_one():
    streams = generate("zb-v", 2, 4).streams
    first, all_stages = fused(streams, range(1)), fused(streams, range(4))
    ops = [[part.op for stream in each for part in units_of(stream)] for each in (first, all_stages)]
    assert 0 < ops[0].count(Op.BW) < ops[1].count(Op.BW)
    assert all(2 * each.count(Op.BW) + each.count(Op.B) + each.count(Op.W) == 32 for each in ops)
    check_order(Program("fused", all_stages, generate("zb-v", 2, 4).placement, 4, 2))
