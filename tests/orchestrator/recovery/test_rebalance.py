"""Layers move off a slow rank's stage, once and only if that helps; in this process (`fake_ray`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRun

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.rebalance import AGAIN
from pentad.orchestrator.recovery.recovery import CHECK_SECONDS
from pentad.orchestrator.run import driver
from pentad.orchestrator.search.rebalanced_plan import layers_per_stage, stage_work, with_layers, with_rebalanced_layers
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start

StartRun = Callable[..., FakeRun]
REBALANCE = "elastic.slow_rank=rebalance"
SMALL = ("model.vocab=300", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=256")  # a light head
LINE = (*SMALL, "mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8", "model.layers=10", REBALANCE)
SQUARE = (*SMALL, "mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4", "model.layers=5", REBALANCE)
EVEN = (*LINE, "model.layers=8")


def slow(*ranks: int) -> SlowRank:
    return SlowRank("compute", ranks, 7, 3, 0.15)


def times(plan: Plan, step: int, factors: dict[int, float]) -> tuple[RankTime, ...]:
    """Rank times: every layer takes 1 ms in F and 2 ms in BW; on the ranks in `factors`, that many times as long."""
    work = stage_work(plan, layers_per_stage(plan))
    return tuple(
        RankTime(step, rank, op, stage, seconds * work[stage] * factors.get(rank, 1.0))
        for rank in range(plan.mesh.size)
        for stage in plan.stages_of(rank)
        for op, seconds in (("F", 1e-3), ("BW", 2e-3))
    )


def asked(run: FakeRun, *ranks: int, factor: float = 1.3) -> Any:
    """What the step loop is told once these ranks have been slow for long."""
    plan = run.group.plan
    run.bus.folder.rank_times.extend(times(plan, step, dict.fromkeys(ranks, factor)) for step in range(8))
    run.bus.lasting_slow_ranks = tuple(map(slow, ranks))
    run.fake.now += CHECK_SECONDS
    return run.recovery.should_regroup({})


@pytest.mark.parametrize(("mesh", "layers"), [(LINE, (3, 2, 3, 2)), (SQUARE, (2, 3))])
def test_layers_leave_a_slow_rank_at_a_step_boundary(
    start: StartRun, mesh: tuple[str, ...], layers: tuple[int, ...]
) -> None:
    run = start(*mesh)
    before = run.group.plan
    assert asked(run, 1) == ()
    run.save(7)  # as the step loop does at this boundary
    assert run.recovery.regroup(7).version == 7 and run.versions() == [7] * 4
    assert run.fake.members() == run.before
    assert layers_per_stage(run.group.plan) == layers and run.folder.plan is run.group.plan
    (event,) = run.events("rebalanced")
    assert (event["ranks"], event["step"]) == ([1], 7)
    assert (event["before"], event["layers"]) == ([*layers_per_stage(before)], [*layers])
    assert event["predicted_seconds"][1] < 0.98 * event["predicted_seconds"][0]
    assert "layers per stage" in event["sentence"] and run.events("recovered")[0]["how"] == "rebalance"
    assert not run.events("lost")


def test_the_plan_is_that_of_a_run_with_these_layers_in_its_configuration(start: StartRun, tmp_path: Path) -> None:
    run = start(*SQUARE)
    assert asked(run, 1) == ()
    run.save(7)
    run.recovery.regroup(7)
    assert run.group.plan == make_plan(config_of(tmp_path, "schedule.layers_per_stage=[2, 3]"), "cpu")


@pytest.mark.parametrize(
    ("mesh", "cause"),
    [
        (EVEN, "no layers per stage take 2.0 % off a step with 2/2/2/2"),
        ((*SQUARE, "mesh.dp=4", "mesh.pp=1", "schedule.microbatches=2"), "mesh.pp is 1, so no other stage"),
    ],
)
def test_layers_stay_where_no_other_ones_are_better(start: StartRun, mesh: tuple[str, ...], cause: str) -> None:
    run = start(*mesh)
    for _ in range(3):
        assert asked(run, 1) is None
    (event,) = run.events("not rebalanced")
    assert cause in event["cause"] and "layers stay where they are" in event["sentence"]


def test_without_the_key_nothing_moves(start: StartRun) -> None:
    assert asked(start(*SQUARE[:-1]), 1) is None


def test_layers_move_once_in_many_steps_because_of_a_rank(start: StartRun) -> None:
    run = start(*LINE)
    assert asked(run, 1) == ()
    run.save(7)
    run.recovery.regroup(7)
    assert asked(run, 1, factor=3.0) is None and len(run.events("rebalanced")) == 1
    assert asked(run, 2, factor=2.0) == ()
    run.bus.view = run.bus.view._replace(step=AGAIN + 7)
    run.recovery.rebalance.cancel()
    assert asked(run, factor=1.0) is None  # 3/2/3/2 is as good as any, if no rank is slow
    assert asked(run, 1, factor=3.0) == ()


def test_layers_return_once_the_rank_is_as_fast_as_others(start: StartRun) -> None:
    run = start(*SQUARE)
    assert asked(run, 1, factor=3.0) == ()
    run.save(7)
    run.recovery.regroup(7)
    assert layers_per_stage(run.group.plan) == (1, 4)
    assert asked(run, factor=1.0) is None
    run.bus.view = run.bus.view._replace(step=AGAIN)
    assert asked(run, factor=1.0) == ()
    run.recovery.regroup(7)
    assert layers_per_stage(run.group.plan) == (3, 2) and run.events("rebalanced")[1]["ranks"] == []


def test_a_fault_comes_first(start: StartRun) -> None:
    run = start(*SQUARE)
    assert asked(run, 1) == ()
    run.recovery.recover(run.lose(2), 7)
    assert not run.events("rebalanced") and layers_per_stage(run.group.plan) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LINE, (*LINE, "elastic.replicate_every=3")])
def test_a_run_that_rebalances_records_every_step_once(start: StartRun, mesh: tuple[str, ...]) -> None:
    run = start(*mesh)
    run.group.restore(Start())
    named = [False]

    def name_it(rank: Any, method: str) -> None:
        if method == "run" and rank.version >= 12 and not named[0]:
            named[0], run.bus.lasting_slow_ranks = True, (slow(1),)
            run.bus.folder.rank_times.extend(times(run.group.plan, step, {1: 1.3}) for step in range(8))

    run.fake.on_call = name_it
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    assert [row["step"] for row in run.rows()] == list(range(run.config.run.steps))
    (event,) = run.events("recovered")
    assert (event["how"], event["steps_replayed"]) == ("rebalance", 0) and len(run.events("rebalanced")) == 1


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load(
        None,
        [
            f"run.folder={folder}",
            "run.steps=40",
            "batch.global_batch_size=8",
            "schedule.name=1f1b",
            *SQUARE,
            *overrides,
        ],
    )


def test_a_run_resumes_with_the_layers_that_moved_last(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = {"event": "rebalanced", "pipeline": [2, "1f1b", None], "configured": None, "layers": [3, 2]}
    second = {**first, "configured": [3, 2], "layers": [4, 1]}
    assert with_rebalanced_layers(config, lambda: [{"event": "start"}]) is config
    assert with_rebalanced_layers(config, lambda: [first]).schedule.layers_per_stage == [3, 2]
    for given in (config, with_layers(config, [3, 2])):
        assert with_rebalanced_layers(given, lambda: [first, second]).schedule.layers_per_stage == [4, 1]
    for changed in ("schedule.layers_per_stage=[1, 4]", "schedule.name=zb-h1"):
        other = config_of(tmp_path, changed)
        assert with_rebalanced_layers(other, lambda: [first, second]) is other
    other = config_of(tmp_path, "elastic.slow_rank=report")
    assert with_rebalanced_layers(other, lambda: pytest.fail("the journal was read")) is other


@pytest.mark.parametrize("given", ["[3, 3]", "[5]", "[2, 2, 1]", "[5, 0]"])
def test_layers_per_stage_that_do_not_fit_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(PentadError, match=r"schedule\.layers_per_stage.* is .*: expected"):
        config_of(tmp_path, f"schedule.layers_per_stage={given}")
