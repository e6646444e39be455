"""Metrics and timelines computed from the ranks' step results."""

import math
import time
from dataclasses import replace

import pytest
from fake_runner import loss_of

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.measure import History, finite, mean_loss, typical_pace
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.workers.runtime.results import LossSum, StepResult

PLAN = make_plan(load(None, ["mesh.dp=2", "mesh.pp=2", "cluster.device=cpu"]), "cpu")
COSTS = Costs((2.0, 3.0), (4.0, 5.0), (1.0, 1.5), transfer=0.25)
STEP = simulate(PLAN.program, COSTS)
SECONDS = max(span.end for span in STEP.spans)


def account(rank: int, step: int, start: float, norm: float = 1.0) -> StepResult:
    at, own = PLAN.mesh.coordinates(rank), PLAN.batch.microbatches
    numbers = range(at.dp * own, (at.dp + 1) * own) if at.pp == 1 else ()
    spans = (
        s._replace(step=step, rank=rank, start=s.start + start, end=s.end + start)
        for s in STEP.spans
        if s.rank == at.pp
    )
    return StepResult(
        step=step,
        losses={number: loss_of(step, number) for number in numbers},
        sources=(LossSum(0.0, PLAN.batch.tokens),),
        grad_norm=norm,
        learning_rate=0.5,
        skipped=not math.isfinite(norm),
        spans=tuple(spans),
        data_wait_seconds=0.2 * rank,
        host_seconds=0.1 * rank,
        instructions=1,
        peak_bytes=rank,
        expert_load={at.pp: (rank, 4)},
    )


def call(first: int, starts: list[float], shift: float = 0.0) -> list[list[StepResult]]:
    """Results by [rank][step]; the clocks of the second replica's ranks are `shift` seconds behind."""
    clocks = [0.0, -shift, 0.0, -shift]
    return [[account(rank, first + k, start + clocks[rank]) for k, start in enumerate(starts)] for rank in range(4)]


def test_the_loss_sums_microbatches_in_ascending_order() -> None:
    accounts = [account(rank, 3, 0.0) for rank in range(4)]
    total = 0.0
    for number in range(16):
        total += loss_of(3, number)
    for order in (accounts, accounts[::-1]):
        assert mean_loss(order) == total / PLAN.batch.tokens


def test_a_row_has_every_metric() -> None:
    (row,) = History(PLAN, 7, keep=2).add(call(0, [5.0]))
    assert set(METRIC_KEYS) <= {*row, "total_tokens"}
    assert (row["step"], row["generation"], row["lr"], row["tokens"], row["mfu"]) == (
        0,
        7,
        0.5,
        PLAN.batch.tokens,
        None,
    )
    assert row["step_seconds"] == pytest.approx(SECONDS)
    assert row["tokens_per_second"] == pytest.approx(PLAN.batch.tokens / SECONDS)
    assert row["bubble_measured"] == pytest.approx(STEP.bubble().makespan)
    assert (row["peak_bytes"], row["host_seconds"]) == (3, pytest.approx(0.3))
    assert row["expert_load"] == {0: (1, 8), 1: (5, 8)}  # layer -> loads, summed over ranks


def test_a_row_has_the_z_losses_that_are_configured() -> None:
    """The mean squared log-sum-exp of the logits of target tokens, and of the router logits of tokens, times their
    weights. Only ranks with the head, or with experts, have sums, and these are equal."""
    sizes = {"num_experts": 4, "top_k": 2, "intermediate_size": 32}
    words = ["model.family=mixtral", *(f"model.experts.{key}={size}" for key, size in sizes.items())]
    weights = ["optimizer.z_loss=0.25", "model.experts.router_z_loss_coef=0.5"]
    plan = make_plan(load(None, ["mesh.dp=2", "mesh.pp=2", "cluster.device=cpu", *words, *weights]), "cpu")
    step = [account(rank, 0, 5.0) for rank in range(4)]
    step = [replace(each, squared_lse=8.0 * (rank % 2), router_squared_lse=6.0) for rank, each in enumerate(step)]
    (row,) = History(plan, 1, keep=2).add([[each] for each in step])
    assert row["z_loss"] == 0.25 * 8.0 / row["target_tokens"]
    assert row["router_z_loss"] == 0.5 * 6.0 / row["tokens"]
    (plain,) = History(PLAN, 1, keep=2).add(call(0, [5.0]))
    assert not {"z_loss", "router_z_loss"} & plain.keys()


def test_a_row_has_the_loss_of_each_of_several_sources() -> None:
    """Null for a source without target tokens in the step."""
    specs = tuple(replace(PLAN.data.sources[0], name=name) for name in ("web", "code", "chat"))
    plan = replace(PLAN, data=replace(PLAN.data, sources=specs))
    sums = LossSum(6.0, 4), LossSum(3.0, PLAN.batch.tokens - 4), LossSum(0.0, 0)
    (row,) = History(plan, 1, keep=2).add([[replace(account(rank, 0, 5.0), sources=sums)] for rank in range(4)])
    assert row["sources"] == {
        "web": {"loss": 1.5, "target_tokens": 4},
        "code": {"loss": 3.0 / (PLAN.batch.tokens - 4), "target_tokens": PLAN.batch.tokens - 4},
        "chat": {"loss": None, "target_tokens": 0},
    }
    assert "sources" not in History(PLAN, 1, keep=2).add(call(0, [5.0]))[0]


def test_a_row_has_the_unix_time_at_which_its_step_ended() -> None:
    (row,) = History(PLAN, 1, keep=2).add(call(0, [time.monotonic() - SECONDS]))
    assert row["time"] == pytest.approx(time.time(), abs=1.0)


def test_a_step_is_timed_from_the_end_of_the_previous_one_except_after_a_pause() -> None:
    history = History(PLAN, 1, keep=2)
    seconds = [row["step_seconds"] for row in history.add(call(0, [0.0, SECONDS + 1, 2 * SECONDS + 1]))]
    assert seconds == pytest.approx([SECONDS, SECONDS + 1, SECONDS])
    history.pause()
    assert history.add(call(3, [1000.0]))[0]["step_seconds"] == pytest.approx(SECONDS)


def test_the_planned_bubble_uses_measured_costs() -> None:
    history = History(PLAN, 1, keep=2)
    (row,) = history.add(call(0, [0.0]))
    assert history.costs.forward == pytest.approx(COSTS.forward)
    assert history.costs.weight == pytest.approx(COSTS.weight)
    assert row["bubble_planned"] == pytest.approx(STEP.bubble().makespan, abs=0.02)
    assert simulate(PLAN.program, history.costs).makespan == pytest.approx(STEP.makespan, rel=0.05)


def test_clock_offsets_of_other_nodes_are_applied() -> None:
    right = History(PLAN, 1, keep=9).add(call(0, [0.0, SECONDS]))
    shifted = History(PLAN, 1, keep=9, offsets=(0.0, 50.0, 0.0, 50.0)).add(call(0, [0.0, SECONDS], shift=50.0))
    for key in ("step_seconds", "bubble_measured"):
        assert [row[key] for row in shifted] == pytest.approx([row[key] for row in right])


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_the_timeline_keeps_the_last_steps(keep: int) -> None:
    history = History(PLAN, 1, keep=keep)
    history.add(call(0, [0.0, SECONDS]))
    history.add(call(2, [2 * SECONDS]))
    assert history.timeline.steps == tuple(range(3 - keep, 3))


def test_non_finite_values_become_null() -> None:
    assert finite(1.5) == 1.5
    assert [finite(x) for x in (math.nan, math.inf)] == [None, None]
    accounts = [[account(rank, 0, 0.0, norm=math.nan)] for rank in range(4)]
    (row,) = History(PLAN, 1, keep=1).add(accounts)
    assert row["skipped"]
    assert row["grad_norm"] is None


def test_the_typical_pace_excludes_the_first_step() -> None:
    rows = [{"tokens_per_second": pace} for pace in (1.0, 10.0, 12.0, 14.0)]
    assert typical_pace(rows) == 12.0
    assert typical_pace(rows[:1]) == 1.0


def test_steps_of_a_ramp_have_tokens_bubble_and_timeline_of_their_own_program() -> None:
    ramp = "batch.rampup=[{global_batch_size: 8, steps: 2}]"
    plan = make_plan(load(None, ["mesh.dp=2", "mesh.pp=2", "cluster.device=cpu", ramp]), "cpu")
    history = History(plan, 1, keep=5)
    small, full = call(0, [0.0, SECONDS]), call(2, [2 * SECONDS, 3 * SECONDS])
    rows = history.add([[replace(result, program=1) for result in of_rank] for of_rank in small])
    assert (history.program, history.timeline.steps) == (1, (0, 1))
    rows += history.add(full)
    assert (history.program, history.timeline.steps) == (0, (2, 3))
    assert [row["tokens"] for row in rows] == [8 * 128] * 2 + [16 * 128] * 2
    planned = [simulate(program, COSTS).bubble().makespan for program in plan.programs]
    assert [row["bubble_planned"] for row in rows] == pytest.approx([planned[1]] * 2 + [planned[0]] * 2)
