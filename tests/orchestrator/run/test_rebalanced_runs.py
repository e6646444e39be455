"""Layers move off a rank with 15 % more work on real nodes: at least half of what it costs is recovered, and the run
ends with the bits of one that stops there and resumes with these layers in its configuration."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch
from elastic_cases import Start
from multinode import Cluster, Run
from padded_runner import BEGINS, command

from pentad.orchestrator.records.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.timeout(600)]
STEPS, MORE = 104, 107
COMMON = (
    *("schedule.name=1f1b", "eval.every=0", "checkpoint.keep=9", "elastic.slow_rank=rebalance"),
    f"optimizer.decay_steps={STEPS}",  # the same for runs with more steps
)


def seconds(run: Run, first: int, end: int) -> float:
    return median(row["step_seconds"] for row in run.rows()[first:end])


@pytest.mark.parametrize(
    ("sizes", "before", "slow", "after"),
    [
        ({"pp": 2}, [2, 3], 1, [[3, 2]]),
        ({"pp": 3}, [2, 3, 2], 1, [[3, 2, 2], [2, 2, 3]]),
        ({"pp": 4}, [2, 2, 3, 3], 3, [[2, 3, 3, 2], [3, 2, 3, 2]]),
        ({"dp": 2, "pp": 2}, [2, 3], 3, [[3, 2]]),
    ],
)
def test_half_of_what_a_slow_rank_costs_is_recovered(
    nodes: Cluster,
    start_run: Start,
    sizes: dict[str, int],
    before: list[int],
    slow: int,
    after: list[list[int]],
) -> None:
    nodes.resize(math.prod(sizes.values()))
    mesh = (
        *(f"mesh.{axis}={size}" for axis, size in sizes.items()),
        f"schedule.microbatches={8 // sizes.get('dp', 1)}",
        f"model.layers={sum(before)}",
        *COMMON,
    )
    given, resumed = f"schedule.layers_per_stage={before}", command(slow)
    run = start_run(*mesh, given, f"run.steps={STEPS}", name="moved", command=resumed)
    assert run.end() == 0, run.describe()
    moved = run.events("rebalanced")
    assert len(moved) == 1, [*run.events("slow rank"), *run.events("not rebalanced"), run.describe()]
    event = moved[0]
    assert event["ranks"] == [slow] and event["layers"] in after, run.describe()
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["steps_replayed"]) == ("rebalance", 0)
    step, rows = event["step"], run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert verify(run.folder, rows, run.events(), data=True).steps == STEPS
    even, late, after_move = seconds(run, 5, BEGINS - 2), seconds(run, BEGINS + 2, step), seconds(run, step + 3, STEPS)
    print(
        f"{sizes}: {before} -> {event['layers']}: {even:.4f} s, {late:.4f} s slow, {after_move:.4f} s after step {step}"
    )
    print(f"recovered {(late - after_move) / (late - even):.0%}, predicted {event['predicted_seconds']}")
    assert late - after_move >= 0.5 * (late - even) > 0, run.describe()

    for layers, end in ((before, step), (event["layers"], STEPS)):
        same = start_run(*mesh, f"schedule.layers_per_stage={layers}", f"run.steps={end}", name="same")
        assert same.end() == 0, same.describe()
    assert [(row["step"], row["loss"]) for row in same.rows()] == [(row["step"], row["loss"]) for row in rows]
    actual, expected = run.state(STEPS), same.state(STEPS)
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)

    again = start_run(*mesh, given, f"run.steps={MORE}", name="moved", command=resumed)
    assert again.end() == 0, again.describe()
    changes = again.events("start")[-1]["changes"]
    assert changes["schedule.layers_per_stage"] == [before, event["layers"]] and len(again.rows()) == MORE
