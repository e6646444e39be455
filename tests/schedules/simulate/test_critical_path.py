"""The critical path has no gaps and is as long as the step; scenarios are simulations with changed costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import Scenario, Segment, breakdown, critical_path, what_if
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import COMPUTE

SECONDS = st.floats(0.1, 4)
PROGRAMS = [("gpipe", 1, 3), ("1f1b", 4, 6), ("zb-h1", 3, 5), ("zb-h2", 3, 6), ("zb-v", 3, 6), ("dualpipe", 4, 8)]
compiled = cache(compile_program)


@st.composite
def costs_of(draw: st.DrawFn, stages: int, *, tail: bool = True) -> Costs:
    each = st.tuples(*[SECONDS] * stages)
    reduce, norm, step = (draw(SECONDS) if tail else 0.0 for _ in range(3))
    transfer = draw(st.sampled_from([0.0, 0.3, 2.0]))
    return Costs(draw(each), draw(each), draw(each), transfer, reduce, norm, step)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=5)
def test_the_path_has_no_gap_and_is_as_long_as_the_step(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, gated=data.draw(st.booleans()), replicas=2)
    costs = data.draw(costs_of(program.stages))
    path = critical_path(program, costs)
    spans = {(span.rank, span.name): span for span in simulate(program, costs).spans}
    assert path[0].start == 0
    assert path[-1].end == max(span.end for span in spans.values())
    assert all(one.end == other.start for one, other in pairwise(path))
    assert all((step.start, step.end) == spans[step.rank, step.key][8:] for step in path)
    assert sum(step.end - step.start for step in path) == pytest.approx(path[-1].end)
    by_op, by_rank = breakdown(path)
    assert sum(by_op.values()) == pytest.approx(path[-1].end)
    assert sum(by_rank.values()) == pytest.approx(path[-1].end)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=5)
def test_without_a_tail_the_path_is_as_long_as_the_makespan(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    costs = data.draw(costs_of(program.stages, tail=False))
    path = critical_path(program, costs)
    assert path[-1].end == simulate(program, costs).makespan
    assert sum(step.end - step.start for step in path) == pytest.approx(path[-1].end)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=5)
def test_each_segment_waited_for_the_one_before_it(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, gated=data.draw(st.booleans()), replicas=2)
    actions = {(r, str(p.key)): (u, p) for r, s in enumerate(program.streams) for u in s for p in u.parts}
    costs = data.draw(costs_of(program.stages))
    path = critical_path(program, costs)
    ends = {(span.rank, span.name): span.end for span in simulate(program, costs).spans}
    assert [step.why == "start" for step in path] == [k == 0 for k in range(len(path))]
    for one, step in pairwise(path):
        action, part = actions[step.rank, step.key]
        waits = {str(key) for key in action.waits}
        before, last = actions[one.rank, one.key]
        if step.why == "data":
            assert one.rank == step.rank and one.op in COMPUTE
            assert waits & {str(key.key) for key in before.parts}
        elif step.why == "transfer":
            brought = [key for key in waits if actions[step.rank, key][1].op not in COMPUTE]
            assert last.op not in COMPUTE and step.start in {ends[step.rank, key] for key in brought}
        elif part.op in COMPUTE:
            assert step.why == "order" and one.rank == step.rank and last.lane == "compute"


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=4)
def test_a_slower_rank_adds_at_least_its_share_of_the_path(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches)
    costs = data.draw(costs_of(program.stages))
    path = critical_path(program, costs)
    for rank in range(ranks):
        compute = sum(step.end - step.start for step in path if step.rank == rank and step.op in COMPUTE)
        slow = replace(costs, slowdown=tuple(1.5 if r == rank else 1.0 for r in range(ranks)))
        assert critical_path(program, slow)[-1].end >= path[-1].end + compute / 2 - 1e-9


def test_the_path_of_one_microbatch_goes_through_all_ranks_and_back() -> None:
    path = critical_path(compiled("1f1b", 2, 1), Costs.uniform(2, 1.0, 2.0, 0.5, transfer=0.25))
    assert path == (
        Segment(0, "0F0", "F", 0.0, 1.0, "start"),
        Segment(0, "0SEND_F0", "SEND_F", 1.0, 1.25, "data"),
        Segment(1, "1F0", "F", 1.25, 2.25, "transfer"),
        Segment(1, "1BW0", "BW", 2.25, 4.75, "order"),
        Segment(1, "1SEND_B0", "SEND_B", 4.75, 5.0, "data"),
        Segment(0, "0BW0", "BW", 5.0, 7.5, "transfer"),
    )
    assert breakdown(path).by_op == {"F": 2.0, "SEND_F": 0.25, "BW": 5.0, "SEND_B": 0.25}
    assert breakdown(path).by_rank == {0: 3.75, 1: 3.75}


def uneven(stages: int) -> Costs:
    each = [tuple(1 + (stage * k % 7) / 8 for stage in range(stages)) for k in (1, 2, 3)]
    return Costs(each[0], each[1], each[2], transfer=0.3, reduce=(0.7,) * stages, norm=0.2, step=0.4, launch=0.1)


def simulated(name: str, program_costs: tuple, costs: Costs) -> Scenario:
    program, given_costs = program_costs
    timeline, before = simulate(program, costs), simulate(program, given_costs).makespan
    return Scenario(name, timeline.makespan, timeline.longest, 100 * (timeline.makespan / before - 1))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_scenario_is_a_simulation_with_its_costs(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    costs = uneven(program.stages)
    own = (program, costs)
    slow = [tuple(1.2 if r == rank else 1.0 for r in range(ranks)) for rank in range(ranks)]
    assert what_if(program, costs) == [
        simulated("as it is", own, costs),
        *(simulated(f"rank {rank} 1.2x slower", own, replace(costs, slowdown=slow[rank])) for rank in range(ranks)),
        simulated("links at half speed", own, replace(costs, transfer=0.6)),
        simulated("transfers free", own, replace(costs, transfer=0.0)),
        simulated("launches twice as long", own, replace(costs, launch=0.2)),
        simulated("W free", own, replace(costs, weight=(0.0,) * program.stages)),
    ]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_higher_costs_never_shorten_a_step_and_lower_ones_never_lengthen_it(
    name: str, ranks: int, microbatches: int
) -> None:
    program = compiled(name, ranks, microbatches)
    for found in what_if(program, uneven(program.stages)):
        if "free" in found.name:
            assert found.change <= 0
        else:
            assert found.change >= 0


def test_given_slowdowns_and_links_are_scaled() -> None:
    program = compiled("1f1b", 2, 4)
    links = ((0.0, 0.5), (0.25, 0.0))
    costs = replace(uneven(2), slowdown=(1.0, 2.0), links=links)
    found = {scenario.name: scenario for scenario in what_if(program, costs)}
    slower = simulate(program, replace(costs, slowdown=(1.0, 2.4)))
    assert found["rank 1 1.2x slower"].makespan == slower.makespan
    halved = simulate(program, replace(costs, links=((0.0, 1.0), (0.5, 0.0))))
    assert found["links at half speed"].makespan == halved.makespan
