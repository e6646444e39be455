"""What evaluations cost: the time of a round, its share of the run, and its memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import costs_of, memories
from pentad.orchestrator.planning.eval_cost import eval_cost
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.costs import Costs


@pytest.mark.parametrize(("name", "slots"), [("1f1b", (0, 0, 1, 0)), ("zb-v", (3, 0, 0, 0)), ("gpipe", (0, 0, 0, 0))])
def test_memory_beyond_training_is_that_of_slots_and_counts_in_the_plan(name: str, slots: tuple[int, ...]) -> None:
    config = load(None, [f"schedule.name={name}"])
    plan = make_plan(config, "cpu")
    found = eval_cost(config, plan, costs_of(plan), [20])
    assert found is not None
    slot = plan.sequence_parallel_tokens * plan.model.hidden * 4
    assert found.extra_bytes == tuple(count * slot for count in slots)
    trained = memories(replace(plan, eval=None))
    for rank, each in enumerate(memories(plan)):
        assert each["total"] == trained[rank]["total"] + found.extra_bytes[rank]
        assert 0 < found.activations[rank] < trained[rank]["activations"]


def test_a_round_of_forwards_takes_them_and_one_way_through_the_pipeline() -> None:
    config = load(None, ["schedule.name=1f1b", "schedule.microbatches=8", "eval.every=20", "run.steps=50"])
    plan = make_plan(config, "cpu")
    found = eval_cost(config, plan, Costs.uniform(4), [20, 16])
    assert found is not None
    assert found.round_seconds == pytest.approx(8 + 3)
    assert (found.round.bubble().makespan, found.round.bubble().longest) == pytest.approx((3 / 11, 0))
    assert (found.rounds, found.count) == (3, 3)  # batches of 16
    assert found.seconds == pytest.approx(33)
    assert found.share(50 * 33) == pytest.approx(3 * 33 / (3 * 33 + 50 * 33))
    unknown = eval_cost(config, plan, Costs.uniform(4), [20, None])
    assert unknown is not None and unknown.seconds is unknown.share(1.0) is None
    assert eval_cost(config, replace(plan, eval=None), Costs.uniform(4), []) is None


def test_plan_shows_evaluations(pentad: Pentad, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").symlink_to(corpus)
    words = ("data.path=corpus", "model.vocab=300", "eval.every=20", "run.steps=60", "eval.sequences=null")
    shown = pentad("plan", *words, "--device", "cuda")[1]
    assert " an evaluation every 20 steps: " in shown and " of the run's time" in shown
    facts = json.loads(pentad("plan", *words, "--device", "cuda", "--json")[1])
    found = facts["evaluation"]
    assert (found["every"], found["evaluations"]) == (20, 3) and found["rounds"] >= 1
    assert found["seconds"] == pytest.approx(found["rounds"] * found["round"]["seconds"])
    trained = 60 * facts["predicted"]["step_seconds"]
    assert found["share"] == pytest.approx(3 * found["seconds"] / (3 * found["seconds"] + trained))
    none = pentad("plan", "data.path=corpus", "data.holdout=0", "eval.every=0", "model.vocab=300", "--json")[1]
    assert json.loads(none)["evaluation"] is None
    status, out, _ = pentad("plan", *words, "eval.data=nowhere", "--device", "cuda")
    assert status == 1 and "the data cannot be used on this machine: eval.data is '" in out
