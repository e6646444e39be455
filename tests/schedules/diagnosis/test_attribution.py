"""The parts of a step add up to its time on every rank; removing a cause saves as much time as in a simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.attribution import PARTS, LayerWait, Measured, RankStep, Starved, attribute
from pentad.schedules.diagnosis.causes import find_causes, saved_by_clock
from pentad.schedules.diagnosis.replay import Replay
from pentad.schedules.diagnosis.step_view import StepView
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import SENDS
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions

compiled = cache(compile_program)
MEMORY = {
    "": MemoryOptions(),
    "zero3": MemoryOptions(zero=3, max_gathered=None, reduce="microbatch"),
    "recompute": MemoryOptions(recompute=frozenset({0, 1})),
    "offload": MemoryOptions(offload=frozenset({0})),
}
FAST = [
    ("1f1b", 2, ""),
    ("zb-h2", 4, "recompute"),
    ("zb-v", 2, "zero3"),
    ("dualpipe", 4, ""),
    ("interleaved", 2, "offload"),
]
ALL = [
    (name, ranks, memory)
    for name in (
        *("gpipe", "1f1b", "1f1b-eager", "seq-1f1b", "looped-bfs", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p"),
        *("interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev"),
    )
    for ranks in (2, 4)
    for memory in MEMORY
]
MESHES = [{}, {"dp": 2}, {"tp": 2}, {"dp": 2, "cp": 2}, {"ep": 2, "tp": 2}]
cases = pytest.mark.parametrize(
    ("name", "ranks", "memory"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)]
)


def program_of(name: str, ranks: int, memory: str, replicas: int = 2, *, post_validation: bool = False) -> Program:
    options = ScheduleOptions(slices=2) if name == "seq-1f1b" else ScheduleOptions()
    given = {"replicas": replicas, "options": options, "memory_options": MEMORY[memory]}
    return compiled(name, ranks, 8, post_validation=post_validation, **given)


def costs_of(program: Program, seed: int = 0) -> Costs:
    draw = random.Random(seed)

    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw.uniform(low, high) * 1e-3 for _ in range(program.stages))

    forward, backward, weight = each(2, 3), each(2, 3), each(1, 3)
    reduce, gather, offload = each(1, 4), each(0.2, 2), each(0.2, 2)
    return Costs(
        *(forward, backward, weight), transfer=4e-4, norm=4e-4, step=2e-3, reduce=reduce, gather=gather, offload=offload
    )


def mesh_of(ranks: int, sizes: dict[str, int]) -> Mesh:
    return Mesh(pp=ranks, **sizes)


def sums(steps: tuple[RankStep, ...], part: str) -> int:
    return sum(step.parts[part] for step in steps)


def jittered(timeline: Timeline, seed: int) -> Timeline:
    """Every span a little later and longer, as if measured by clocks that disagree."""
    draw = random.Random(seed)
    spans = []
    for span in timeline.spans:
        late, long = draw.uniform(0, 1e-3), draw.uniform(0, 2e-3)
        spans.append(span._replace(start=7e5 + span.start + late, end=7e5 + span.end + late + long))
    return Timeline("measured", tuple(spans))


@cases
def test_parts_add_up_and_a_simulated_step_has_only_the_bubble_of_its_schedule(
    name: str, ranks: int, memory: str
) -> None:
    program = program_of(name, ranks, memory)
    costs, sizes = costs_of(program), MESHES[len(name) % len(MESHES)]
    mesh, timeline = mesh_of(ranks, sizes), simulate(program, costs)
    steps = attribute(program, mesh, to_mesh_ranks(timeline, mesh), costs)
    view = StepView(program, mesh, to_mesh_ranks(timeline, mesh))
    assert [step.nanoseconds for step in steps] == [view.end(rank) for rank in range(mesh.size)]
    assert all(set(step.parts) == set(PARTS) and min(step.parts.values()) >= 0 for step in steps)
    assert sums(steps, "host") == sums(steps, "late peers") == sums(steps, "data") == 0
    busy = timeline.busy_by_rank
    for step in steps:
        assert step.parts["compute"] == pytest.approx(1e9 * busy[mesh.coordinates(step.rank).pp][2], abs=1e4)
        assert step.parts["optimizer"] == pytest.approx(2e6, abs=10)


@cases
def test_what_costs_nothing_has_no_part(name: str, ranks: int, memory: str) -> None:
    program = program_of(name, ranks, memory)
    costs = replace(costs_of(program), transfer=0.0, norm=0.0, reduce=(), gather=(), offload=())
    steps = attribute(program, mesh_of(ranks, {}), simulate(program, costs), costs)
    assert sums(steps, "between stages") == sums(steps, "parameters") == sums(steps, "copies") == 0


@cases
def test_parts_of_a_noisy_step_add_up_to_its_time(name: str, ranks: int, memory: str) -> None:
    program = program_of(name, ranks, memory)
    costs = costs_of(program)
    for seed, sizes in enumerate(MESHES):
        mesh = mesh_of(ranks, sizes)
        timeline = jittered(to_mesh_ranks(simulate(program, costs), mesh), seed)
        view = StepView(program, mesh, timeline)
        began = {rank: timeline.spans[0].start - 0.01 * rank for rank in range(mesh.size)}
        others = Measured(began, {0: 0.003, 1: 50.0}, {rank: LayerWait(1e-3 * rank, 5e-4) for rank in range(mesh.size)})
        for step in attribute(program, mesh, timeline, costs, others):
            begin = min(round((began[step.rank] - view.zero) * 1e9), view.first_start(step.rank))
            assert step.nanoseconds == view.end(step.rank) - begin
            assert min(step.parts.values()) >= 0


@cases
def test_a_slow_rank_costs_the_others_a_bubble_that_the_schedule_does_not_have(
    name: str, ranks: int, memory: str
) -> None:
    program = program_of(name, ranks, memory)
    costs = costs_of(program)
    slow = replace(costs, slowdown=(*[1.0] * (ranks - 1), 1.5))
    mesh, timeline = mesh_of(ranks, {}), simulate(program, slow)
    steps = attribute(program, mesh, timeline, costs)
    assert sum(step.parts["late peers"] for step in steps[:-1]) > 0
    ideal = simulate(program, costs)
    assert sums(steps, "schedule bubble") <= sums(attribute(program, mesh, ideal, costs), "schedule bubble")


@cases
def test_a_replay_takes_as_long_as_the_step_and_less_without_a_cause(name: str, ranks: int, memory: str) -> None:
    program = program_of(name, ranks, memory)
    costs, mesh = costs_of(program), mesh_of(ranks, {"dp": 2})

    def replay(given: Costs) -> Replay:
        timeline = to_mesh_ranks(simulate(program, given), mesh)
        return Replay(StepView(program, mesh, timeline), {}, Measured(), blocking_host=False)

    def seconds(given: Costs) -> float:
        return max(span.end for span in simulate(program, given).spans)

    base = replay(costs)
    assert base.makespan() == pytest.approx(seconds(costs), rel=1e-6)
    assert base.scaled("between stages") == pytest.approx(seconds(replace(costs, transfer=0.0)), rel=1e-6)
    faster = seconds(replace(costs, slowdown=(0.8,) * ranks))
    assert base.makespan() - saved_by_clock(base, 1.25) == pytest.approx(faster, rel=1e-6)
    assert base.scaled("optimizer", 0.5) == pytest.approx(seconds(replace(costs, step=1e-3)), rel=1e-6)
    assert all(cause.kind not in ("slow rank", "slow link") for cause in find_causes(base, {}))


def slow_replica(program: Program, mesh: Mesh, costs: Costs) -> tuple[Timeline, float]:
    """A step whose last rank takes 1.6 times as long, and the seconds that the other replica waits for this rank's
    replica at the end."""
    slow = replace(costs, slowdown=(1.0, 1.6))
    quick, long = (simulate(program, each).spans for each in (costs, slow))
    of_replica = [to_mesh_ranks(Timeline("measured", spans), mesh).spans for spans in (quick, long)]
    late = max(span.end for span in long) - max(span.end for span in quick)
    spans = [span for span in of_replica[1] if mesh.coordinates(span.rank).dp == 1]
    tail = ("ALL_REDUCE", "NORM", "STEP")
    for span in of_replica[0]:
        if mesh.coordinates(span.rank).dp == 0:
            moved = late if span.op in tail else 0.0
            spans.append(span._replace(start=span.start + moved, end=span.end + moved))
    return Timeline("measured", tuple(spans)), late


def test_the_largest_cause_of_a_step_with_a_slow_replica_is_that_rank() -> None:
    program, mesh = program_of("1f1b", 2, ""), Mesh(dp=2, pp=2)
    timeline, late = slow_replica(program, mesh, costs_of(program))
    replay = Replay(StepView(program, mesh, timeline), {}, Measured(), blocking_host=False)
    slowest = next(cause for cause in find_causes(replay, {}) if cause.kind == "slow rank")
    assert slowest.ranks == (3,) and slowest.factor == pytest.approx(1.6, rel=1e-6)
    assert slowest.seconds == pytest.approx(late, rel=0.05)


def test_a_rank_whose_core_others_had_is_starved_and_not_slow() -> None:
    program, mesh = program_of("1f1b", 2, ""), Mesh(dp=2, pp=2)
    costs = costs_of(program)
    timeline, late = slow_replica(program, mesh, costs)
    longer = sum(span.end - span.start for span in timeline.compute if span.rank == 3) * 0.6 / 1.6
    measured = Measured(starved={3: Starved(longer, 0.0), 0: Starved(0.0, 1e9)})
    steps, plain = (attribute(program, mesh, timeline, costs, each) for each in (measured, Measured()))
    assert steps[3].parts["starved"] == pytest.approx(longer * 1e9, abs=2)
    assert (steps[0].parts["host"], steps[0].parts["starved"]) == (0, plain[0].parts["host"])
    assert [step.nanoseconds for step in steps] == [step.nanoseconds for step in plain]
    causes = find_causes(Replay(StepView(program, mesh, timeline), {}, measured, blocking_host=False), {})
    assert all(cause.kind != "slow rank" for cause in causes)
    assert next(cause for cause in causes if cause.kind == "starved").seconds == pytest.approx(late, rel=0.05)


def test_a_slow_link_is_named_with_both_ends() -> None:
    program, mesh = program_of("1f1b", 4, ""), Mesh(pp=4)
    costs = costs_of(program)
    links = [[costs.transfer] * 4 for _ in range(4)]
    links[1][2] = 20 * costs.transfer
    timeline = simulate(program, replace(costs, links=tuple(map(tuple, links))))
    replay = Replay(StepView(program, mesh, timeline), {}, Measured(), blocking_host=False)
    first = next(cause for cause in find_causes(replay, {}) if cause.kind == "slow link")
    assert first.ranks == (1, 2) and first.factor == pytest.approx(20, rel=1e-3)
    assert replay.makespan() - first.seconds == pytest.approx(
        max(s.end for s in simulate(program, costs).spans), rel=1e-6
    )


def test_an_incomplete_step_is_refused() -> None:
    program = program_of("1f1b", 2, "")
    costs = costs_of(program)
    spans = tuple(span for span in simulate(program, costs).spans if span.op not in SENDS)
    with pytest.raises(PentadError, match="has no 0SEND_F0 of rank 0: expected a complete step"):
        attribute(program, Mesh(pp=2), Timeline("measured", spans), costs)
