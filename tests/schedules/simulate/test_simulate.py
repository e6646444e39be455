"""Simulated times respect every order that a program states, and reproduce the idle times of the papers."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import accumulate

import pytest
from dependency_graph import build, ordered
from hypothesis import given, settings
from hypothesis import strategies as st
from reachability_proof import partner
from schedule_sizes import TYPICAL, allows

from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COLLECTIVES, SENDS, Action
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.simulate import StepTime, simulate, simulate_step_time
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.schedule_spec import MemoryOptions

SECONDS = st.floats(0.1, 10)
SIZES = [(1, 3), (2, 4), (2, 7), (3, 2), (4, 8), (4, 13)]
SLOW = [(2, 7), (4, 13)]
PROGRAMS = [
    pytest.param(name, *size, marks=[pytest.mark.slow] * (size in SLOW or (size == (4, 8) and name not in TYPICAL)))
    for name in CATALOGUE
    for size in SIZES
    if allows(name, *size)
]
compiled = cache(compile_program)


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> Costs:
    """Every stage and every kind of instruction has a cost of its own."""
    each = st.tuples(*[SECONDS] * stages)
    transfer, norm, step, launch = (draw(SECONDS) for _ in range(4))
    return Costs(draw(each), draw(each), draw(each), transfer, norm, step, launch, reduce=draw(each))


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=6)
def test_every_instruction_runs_once_in_the_order_of_lanes_waits_and_rendezvous(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, gated=data.draw(st.booleans()), replicas=2)
    costs = data.draw(costs_of(program.stages))
    spans = simulate(program, costs).spans
    found = {(span.rank, span.name): span for span in spans}
    assert len(found) == len(spans) == sum(len(action.parts) for stream in program.streams for action in stream)
    free: dict[tuple[int, str], float] = defaultdict(float)
    for rank, stream in enumerate(program.streams):
        for action in stream:
            first, last = found[rank, str(action.parts[0].key)], found[rank, str(action.parts[-1].key)]
            assert first.start >= max((found[rank, str(key)].end for key in action.waits), default=0)
            assert first.start >= free[rank, action.lane]
            assert last.start == (first.end if last is not first else first.start)
            free[rank, action.lane] = last.end
            for part in action.parts:
                span = found[rank, str(part.key)]
                assert span.end - span.start == pytest.approx(costs.seconds(part))
                assert (span.op, span.stage, span.microbatch, span.peer) == (*part.key, part.peer)
                if part.op in SENDS:
                    other, key = partner((rank, part.key), part)
                    assert _times(found[other, str(key)]) == _times(span)
                elif part.op in COLLECTIVES:
                    assert (
                        len({_times(found[r, str(part.key)]) for r in range(ranks) if (r, str(part.key)) in found}) == 1
                    )


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=3)
def test_simulation_agrees_with_a_plain_walk_of_the_event_graph(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, gated=data.draw(st.booleans()), replicas=2)
    costs = data.draw(costs_of(program.stages))
    assert simulate(program, costs, step=3) == plain_simulation(program, costs, step=3)


def plain_simulation(program: Program, costs: Costs, *, step: int) -> Timeline:
    """The simulation by its definition: event by event over the graph."""
    graph = build(program)
    starts, ends = [0.0] * len(graph.members), [0.0] * len(graph.members)

    def moments(action: Action, start: float) -> list[float]:
        return list(accumulate((costs.seconds(part) for part in action.parts), initial=start))

    for event in ordered(graph):
        starts[event] = max((ends[earlier] for earlier in graph.before[event]), default=0.0)
        actions = [program.streams[node.rank][node.at] for node in graph.members[event]]
        ends[event] = max(moments(action, starts[event])[-1] for action in actions)
    spans = []
    for node in graph.nodes:
        action = program.streams[node.rank][node.at]
        times = moments(action, starts[graph.event[node]])
        for part, start, end in zip(action.parts, times, times[1:], strict=False):
            where = (part.op.value, part.stage, part.microbatch, part.peer)
            spans.append(Span(step, node.rank, part.lane, str(part.key), *where, start, end))
    return Timeline("simulated", tuple(spans))


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
@settings(max_examples=3)
def test_step_times_are_those_of_the_timeline(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    """To the last bit, with recomputation and offloading as well."""
    stages = generate(name, ranks, microbatches).stages
    memory = data.draw(st.sampled_from([MemoryOptions(), MemoryOptions(3, recompute=frozenset(range(stages)))]))
    costs = data.draw(costs_of(stages))
    program = compile_program(name, ranks, microbatches, replicas=2, memory_options=memory)
    timeline = simulate(program, costs)
    assert simulate_step_time(program, costs) == StepTime(timeline.makespan, timeline.longest, timeline.bubble())


def test_a_program_that_deadlocks_is_not_simulated() -> None:
    program = compiled("1f1b", 2, 2)
    first = ("0RECV_B0", "0BW0")
    hasty = tuple(sorted(program.streams[0], key=lambda action: str(action.key) not in first))
    with pytest.raises(ScheduleError, match=r"^the program deadlocks: "):
        simulate(program.with_streams((hasty, program.streams[1])), Costs.uniform(2))


def _times(span: Span) -> tuple[float, float]:
    return span.start, span.end


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(gated=st.booleans(), data=st.data())
@settings(max_examples=6)
def test_free_transfers_delay_nothing(
    name: str, ranks: int, microbatches: int, gated: bool, data: st.DataObject
) -> None:
    """With transfers that take no time, and the costs it was compiled for, each compute action of the lowered program
    starts when it does in the order alone: neither slots nor lanes nor gates delay anything."""
    each = st.tuples(*[SECONDS] * generate(name, ranks, microbatches).stages)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each))
    order = generate(name, ranks, microbatches, costs=costs)
    program = compile_program(name, ranks, microbatches, costs=costs, gated=gated, replicas=2)
    assert program.compute() == order
    starts = {(span.rank, span.name): span.start for span in simulate(program, costs).compute}
    for rank, times in enumerate(compute_times(order, costs)):
        for action, (start, _) in zip(order.streams[rank], times, strict=True):
            assert starts[rank, str(action.key)] == pytest.approx(start)


def run(name: str, ranks: int, microbatches: int, costs: Costs) -> Timeline:
    return simulate(add_transfers(generate(name, ranks, microbatches), costs, gated=False), costs)


# Idle seconds: makespan (or longest) minus m (F + B + W). F, B and W are multiples of 1/4, so that sums are exact.

RANKS = st.integers(1, 6)
QUARTERS = st.integers(1, 40).map(lambda k: k / 4)


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, st.integers(1, 20), QUARTERS, QUARTERS, QUARTERS)
def test_gpipe_and_1f1b_idle_for_the_ranks_before_and_behind(
    name: str, ranks: int, m: int, f: float, b: float, w: float
) -> None:
    """(p-1)(F+B+W), for any sizes and any costs, by both measures."""
    timeline = run(name, ranks, m, Costs.uniform(ranks, f, b, w))
    assert timeline.makespan - m * (f + b + w) == (ranks - 1) * (f + b + w)
    assert timeline.longest == timeline.makespan


@given(RANKS, st.integers(0, 14), QUARTERS, QUARTERS, QUARTERS)
def test_zb_h1_fills_its_bubble_with_weights(ranks: int, more: int, f: float, b: float, w: float) -> None:
    """For m >= p, the published (p-1)(F+B-W) if W is no longer than F and B. A longer W fills no more than the shorter
    of those: (p-1)(F+B-min(F,B,W))."""
    m = ranks + more
    idle = run("zb-h1", ranks, m, Costs.uniform(ranks, f, b, w)).makespan - m * (f + b + w)
    assert idle == (ranks - 1) * (f + b - min(f, b, w))
    if w <= min(f, b):
        assert idle == (ranks - 1) * (f + b - w)


@given(RANKS, st.data(), QUARTERS, QUARTERS, QUARTERS)
def test_zb_h1_of_few_microbatches_hides_all_weights_but_one(
    ranks: int, data: st.DataObject, f: float, b: float, w: float
) -> None:
    """The makespan is (m+p-1)(F+B) + W for m <= p (appendix H of the paper) if W is no longer than F and B."""
    m, w = data.draw(st.integers(1, ranks)), min(f, b, w)
    assert run("zb-h1", ranks, m, Costs.uniform(ranks, f, b, w)).makespan == (m + ranks - 1) * (f + b) + w


@given(RANKS, st.integers(0, 12), QUARTERS, QUARTERS, QUARTERS)
def test_zb_h2_idles_by_what_two_weights_do_not_fill(ranks: int, more: int, f: float, b: float, w: float) -> None:
    """By longest, for m >= 2p-1: the published (p-1)(F+B-2W) if W is no longer than F and this is not negative. Idle
    time never gets below 0, nor below (p-1)(B-F), by which the first B of a rank is late, however long W is."""
    m = 2 * ranks - 1 + more
    idle = run("zb-h2", ranks, m, Costs.uniform(ranks, f, b, w)).longest - m * (f + b + w)
    assert idle == (ranks - 1) * max(f + b - 2 * w, b - f, 0)
    if w <= f and f + b >= 2 * w:
        assert idle == (ranks - 1) * (f + b - 2 * w)


@given(RANKS, st.integers(0, 12), QUARTERS, QUARTERS, QUARTERS, QUARTERS)
def test_zb_h2_pays_each_hop_twice(ranks: int, more: int, f: float, b: float, w: float, c: float) -> None:
    """By longest, for m >= 2p-1: (p-1)(F+B-2W+2C) if W and C are no longer than F and B."""
    m, w = 2 * ranks - 1 + more, min(f, b, w)
    c = min(c, f, b)
    idle = run("zb-h2", ranks, m, Costs.uniform(ranks, f, b, w, transfer=c)).longest - m * (f + b + w)
    assert idle == (ranks - 1) * (f + b - 2 * w + 2 * c)


@given(st.sampled_from([2, 4, 6]), st.integers(0, 5), QUARTERS, QUARTERS, QUARTERS)
def test_dualpipe_idles_in_one_half_of_the_ranks(ranks: int, more: int, f: float, b: float, w: float) -> None:
    """The published (p/2-1)(F&B + BW - 3W) = (p/2-1)(F+2B-W) is exact if F = B >= W; if B <= F, idle time is
    (p/2-1)(2F+B-min(B,W)). There is no such formula for other costs: a planner has to simulate them."""
    m, b = 2 * (ranks + more), min(f, b)
    idle = run("dualpipe", ranks, m, Costs.uniform(ranks, f, b, w)).makespan - m * (f + b + w)
    assert idle == (ranks / 2 - 1) * (2 * f + b - min(b, w))
    if f == b >= w:
        assert idle == (ranks / 2 - 1) * ((f + b + w) + (b + w) - 3 * w)


# Bubble rates published for three model sizes and microbatch counts each (Qi et al. 2023, arXiv 2401.10241: inputs in
# milliseconds from table 9, rates from table 5).

PUBLISHED = [
    # p, m, F, B, W, C, 1F1B, ZB-H1, ZB-H2
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("column", range(3), ids=["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", PUBLISHED, ids=[f"p{row[0]}-m{row[1]}-F{row[2]}" for row in PUBLISHED])
def test_published_bubble_rates_come_out_to_four_decimals(row: tuple[float, ...], column: int) -> None:
    p, m, f, b, w, c = row[:6]
    timeline = run(("1f1b", "zb-h1", "zb-h2")[column], int(p), int(m), Costs.uniform(int(p), f, b, w, transfer=c))
    assert round(timeline.bubble().longest, 4) == row[6 + column]
