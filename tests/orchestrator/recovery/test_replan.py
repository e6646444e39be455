"""The order of schedule auto changes once, at a step boundary and only if measured costs warrant it; in this process
(`fake_ray`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRun
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning import layout
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.verify import verify
from pentad.orchestrator.recovery import replan
from pentad.orchestrator.recovery.recovery import CHECK_SECONDS
from pentad.orchestrator.recovery.replan import STEPS
from pentad.orchestrator.run import driver, measure
from pentad.orchestrator.search import replanned_order
from pentad.orchestrator.search.rebalanced_plan import with_rebalanced_layers
from pentad.orchestrator.search.replanned_order import (
    LEAST_GAIN,
    PAUSE_SECONDS,
    ReplannedOrder,
    find_order,
    measured_costs,
    order_facts,
    with_replanned_order,
)
from pentad.schedules.catalogue import generate
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import WARM_UP, SlowRank
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import Choice, CostsOf, choose
from pentad.schedules.search.reorder import adds_alike, reorder
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.workers.checkpoint.checkpoint import Start

StartRun = Callable[..., FakeRun]
LITTLE = 3000  # search effort
CHOICES = dict[Any, Choice]()
LINE = (
    *("model.vocab=300", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=256", "model.layers=4"),
    *("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=4", "schedule.memory_limit=3", "schedule.name=auto"),
)


def longer(stage: int, factor: float) -> Costs:
    """Costs with which one stage takes `factor` times as long as the others."""
    seconds = tuple(factor if each == stage else 1.0 for each in range(4))
    return Costs(seconds, seconds, seconds)


EVEN, SLOW = longer(0, 1.0), longer(3, 1.5)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load(None, [f"run.folder={folder}", "run.steps=40", "batch.global_batch_size=8", *LINE, *overrides])


def choose_once(ranks: int, microbatches: int, costs_of: CostsOf, options: ScheduleOptions, *_: Any) -> Choice:
    """`choose`, cached: all tests have the same model and thus the same estimated costs."""
    key = ranks, microbatches, options
    if key not in CHOICES:
        CHOICES[key] = choose(ranks, microbatches, costs_of, options, effort=LITTLE)
    return CHOICES[key]


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "choose", choose_once)
    monkeypatch.setattr(replanned_order, "reorder", partial(reorder, effort=LITTLE))


def times(program: Program, step: int, costs: Costs) -> tuple[RankTime, ...]:
    """Rank times reported for a step with these costs, of compute alone."""
    found = dict[tuple[int, str, int], float]()
    for rank, stream in enumerate(program.streams):
        for part in (part for action in stream for part in action.parts if part.op in COMPUTE):
            key = rank, part.op.value, part.stage
            found[key] = found.get(key, 0.0) + costs.seconds(part)
    return tuple(RankTime(step, *key, seconds) for key, seconds in found.items())


def steps_of(plan: Plan, costs: Costs) -> list[tuple[RankTime, ...]]:
    return [times(plan.program, step, costs) for step in range(WARM_UP + STEPS)]


def asked(run: FakeRun, costs: Costs = SLOW) -> Any:
    """What the step loop is told after enough steps with these costs."""
    run.bus.folder.rank_times.extend(steps_of(run.group.plan, costs))
    for _ in range(2):
        run.fake.now += CHECK_SECONDS
        answer = run.recovery.should_regroup({})
        if run.recovery.replan.search is not None:
            run.recovery.replan.search.result(timeout=60)
    return answer


@pytest.fixture
def planned(tmp_path: Path, little_effort: None) -> tuple[RunConfig, Plan]:
    config = config_of(tmp_path)
    return config, make_plan(config, "cpu")


def test_ranks_keep_their_state_and_take_another_order_at_a_step_boundary(start: StartRun) -> None:
    run = start(*LINE)
    before = run.group.plan
    assert asked(run) == ()
    assert run.recovery.regroup(7).version == 7 and run.versions() == [7] * 4
    assert run.fake.members() == run.before
    (event,) = run.events("replanned")
    after = run.group.plan
    assert (event["step"], event["before"], event["program"]) == (7, before.program.hash, after.program.hash)
    assert before.program.hash != after.program.hash and adds_alike(before.program, after.program)
    predicted = [simulate_step_time(plan.program, costs_measured(before)).makespan for plan in (before, after)]
    assert event["predicted_seconds"] == predicted and predicted[1] <= (1 - LEAST_GAIN) * predicted[0]
    assert run.events("recovered")[0]["how"] == "replan" and not run.events("lost")
    assert run.folder.plan is after and after.program.name.endswith("re-planned")
    assert asked(run, EVEN) is None and asked(run, SLOW) is None  # once


def costs_measured(plan: Plan) -> Costs:
    found = measured_costs(plan, steps_of(plan, SLOW))
    assert found is not None
    return found


@pytest.mark.parametrize("others", [("schedule.name=zb-1p",), ("schedule.replan=false",)])
def test_no_other_order_is_searched(start: StartRun, others: tuple[str, ...]) -> None:
    run = start(*LINE, *others)
    assert asked(run) is None and run.recovery.replan.search is None and not run.events("not replanned")


def test_a_run_says_once_why_it_keeps_its_order(start: StartRun) -> None:
    run = start(*LINE)
    for _ in range(2):
        assert asked(run, EVEN) is None
    (event,) = run.events("not replanned")
    assert "no order takes 2.0 % off a step" in event["cause"] and event["cause"] in event["sentence"]


def test_the_first_steps_and_those_of_smaller_batches_do_not_count(start: StartRun) -> None:
    run = start(*LINE, "batch.rampup=[{global_batch_size: 4, steps: 5}]", "schedule.microbatches=4")
    plan = run.group.plan
    for step in range(5 + WARM_UP + STEPS):
        assert run.recovery.replan.due(plan, run.config) is None and run.recovery.replan.search is None
        run.bus.folder.rank_times.append(times(plan.program, step, SLOW))
    run.recovery.replan.due(plan, run.config)
    assert run.recovery.replan.search is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["start", "connect", "receive"])
def test_a_rank_that_dies_in_the_exchange_is_replaced_with_the_new_order(start: StartRun, method: str) -> None:
    run = start(*LINE)
    assert asked(run) == ()
    run.save(5)
    died = list[Any]()

    def die(rank: Any, called: str) -> None:
        if called == method and rank.number == 2 and not died:
            died.append(rank)
            rank.is_alive = False

    run.fake.on_call = die
    assert run.recovery.regroup(7).version == 5 and run.versions() == [5] * 4 and died
    (event,) = run.events("replanned")
    assert run.group.plan.program.hash == event["program"] == run.folder.plan.program.hash
    assert run.events("recovered")[0]["steps_replayed"] == 2


@pytest.mark.slow
def test_a_fault_comes_first_and_the_order_changes_later(start: StartRun) -> None:
    run = start(*LINE)
    assert asked(run) == ()
    run.save(7)
    run.recovery.recover(run.lose(2), 7)
    assert not run.events("replanned")
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) == () and run.recovery.regroup(7).version == 7
    assert len(run.events("replanned")) == 1


def test_every_step_is_recorded_once_and_verified(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*given: Any) -> Future:
        found: Future = Future()
        found.set_result(find_order(*given))
        return found

    monkeypatch.setattr(replan, "in_thread", at_once)
    monkeypatch.setattr(measure, "times_of_step", lambda program, _, spans, __: times(program, spans[0].step, SLOW))
    run = start(*LINE)
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    assert [row["step"] for row in run.rows()] == list(range(run.config.run.steps))
    (event,), (change,) = run.events("recovered"), run.events("replanned")
    assert (event["how"], event["steps_replayed"]) == ("replan", 0)
    assert change["step"] not in [saved["step"] for saved in run.events("checkpoint")]
    assert verify(run.folder.path, run.rows(), run.folder.journal(), data=False).steps == run.config.run.steps


def test_a_run_resumes_with_the_order_that_it_changed_to(start: StartRun, tmp_path: Path) -> None:
    run = start(*LINE)
    assert asked(run) == ()
    run.recovery.regroup(7)
    file, journal = run.folder.path / "order.arrow", run.folder.journal
    resumed = with_replanned_order(config_of(tmp_path), journal, file)
    assert make_plan(resumed, "cpu") == run.group.plan
    assert start_over(run, resumed).over
    for changed in ("schedule.replan=false", "schedule.memory_limit=2", "schedule.name=1f1b"):
        overrides = (changed, "schedule.memory_limit=null") if "1f1b" in changed else (changed,)
        other = config_of(tmp_path, *overrides)
        assert with_replanned_order(other, journal, file) is other
    assert with_replanned_order(config := config_of(tmp_path), list, file) is config
    generate("1f1b", 4, 4).save(file)
    with pytest.raises(PentadError, match=r"order\.arrow has the order .*: expected .* as the run's journal has it"):
        with_replanned_order(config_of(tmp_path), journal, file)


def start_over(run: FakeRun, config: RunConfig) -> replan.Replan:
    return replan.Replan(config, run.group, run.bus)


@pytest.mark.slow
def test_layers_that_move_later_keep_the_order(start: StartRun, tmp_path: Path) -> None:
    given = "model.layers=6", "schedule.layers_per_stage=[1, 2, 1, 2]", "elastic.slow_rank=rebalance"
    run = start(*LINE, *given)
    assert asked(run, longer(1, 1.5)) == () and run.recovery.regroup(7).version == 7
    run.bus.folder.rank_times.extend(steps_of(run.group.plan, longer(3, 3.0)))
    run.bus.lasting_slow_ranks = (SlowRank("compute", (3,), 7, 3, 0.5),)
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) == ()
    run.save(7)
    assert run.recovery.regroup(7).version == 7
    assert len(run.events("rebalanced")) == len(run.events("replanned")) == 1
    assert run.group.plan.program.name.endswith("re-planned") and len(run.group.plan.layers[3].numbers) == 1
    journal = run.folder.journal
    moved = with_rebalanced_layers(config_of(tmp_path, *given), journal)
    assert make_plan(with_replanned_order(moved, journal, run.folder.path / "order.arrow"), "cpu") == run.group.plan


FACTORS = st.lists(st.floats(0.6, 1.6), min_size=12, max_size=12)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(factors=FACTORS, left=st.integers(1, 60))
def test_an_order_changes_only_to_a_faster_one_with_the_same_sums(
    planned: tuple[RunConfig, Plan], factors: list[float], left: int
) -> None:
    config, plan = planned
    steps = steps_of(plan, Costs(tuple(factors[:4]), tuple(factors[4:8]), tuple(factors[8:])))
    found = find_order(config, plan, steps, left)
    if isinstance(found, str):
        return
    costs = measured_costs(plan, steps)
    assert costs is not None
    before, after = (simulate_step_time(program, costs).makespan for program in (plan.program, found.plan.program))
    assert (found.before, found.after) == (before, after) and after <= (1 - LEAST_GAIN) * before
    assert left * (before - after) >= PAUSE_SECONDS
    assert adds_alike(plan.program, found.plan.program) and found.plan.layers == plan.layers
    assert found.plan.param_shards == plan.param_shards


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.floats(0.01, 100))
def test_an_order_stays_at_the_costs_that_it_was_searched_with(planned: tuple[RunConfig, Plan], scale: float) -> None:
    config, plan = planned
    guess = costs_of(plan)
    forward, backward, weight = (
        tuple(scale * (each + guess.launch) for each in op) for op in (guess.forward, guess.backward, guess.weight)
    )
    assert isinstance(find_order(config, plan, steps_of(plan, Costs(forward, backward, weight)), 10**9), str)


def test_a_stage_that_takes_longer_than_estimated_changes_the_order(planned: tuple[RunConfig, Plan]) -> None:
    config, plan = planned
    found = find_order(config, plan, steps_of(plan, SLOW), 40)
    assert isinstance(found, ReplannedOrder) and found.gain >= 0.04
    few = find_order(config, plan, steps_of(plan, SLOW), 1)
    assert isinstance(few, str) and "the 1 steps that are left would gain" in few
    assert order_facts(found.config) == order_facts(config)


def test_times_that_are_not_complete_change_nothing(planned: tuple[RunConfig, Plan]) -> None:
    config, plan = planned
    steps = [tuple(each for each in step if each.stage != 2) for step in steps_of(plan, SLOW)]
    assert find_order(config, plan, steps, 40) == f"the times of the first {len(steps)} steps are not complete"


def test_only_auto_is_re_planned(tmp_path: Path) -> None:
    with pytest.raises(
        PentadError, match=r"schedule\.replan is true: expected null or false for schedule\.name = 1f1b"
    ):
        config_of(tmp_path, "schedule.name=1f1b", "schedule.memory_limit=null", "schedule.replan=true")
