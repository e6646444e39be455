"""A stage takes 1.5 times as long as estimated, on real nodes: steps become shorter once the order has changed, and
the run ends with the bits of one whose order stays."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from elastic_cases import Start
from multinode import Cluster
from padded_runner import command

from pentad.orchestrator.api.comparison import compare
from pentad.orchestrator.records.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, MORE = 50, 52
LINE = (
    *("mesh.pp=4", "schedule.microbatches=8", "schedule.memory_limit=2", "schedule.name=auto"),
    *("eval.every=0", "elastic.hang_seconds=10"),
)


def test_steps_are_shorter_after_the_order_has_changed(nodes: Cluster, start_run: Start) -> None:
    nodes.resize(4)
    run = start_run(*LINE, f"run.steps={STEPS}", name="changed", command=command("LongFirst"))
    assert run.end() == 0, run.describe()
    (event,), (recovered,) = run.events("replanned"), run.events("recovered")
    assert (recovered["how"], recovered["steps_replayed"]) == ("replan", 0)
    step, rows = event["step"], run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert verify(run.folder, rows, run.events(), data=True).steps == STEPS
    before, after = (median(row["step_seconds"] for row in part) for part in (rows[3:step], rows[step + 3 :]))
    predicted = event["predicted_seconds"]
    print(f"{before:.3f} s a step, {after:.3f} s after step {step}, predicted {predicted}; {recovered['seconds']}")
    assert after < before - 0.5 * (predicted[0] - predicted[1]), run.describe()
    shown = compare(run.folder)
    assert shown.run.program.hash == event["program"] and shown.run.program.name.endswith("re-planned")
    actual = run.state(STEPS)

    again = start_run(*LINE, f"run.steps={MORE}", name="changed", command=command("LongFirst"))
    assert again.end() == 0, again.describe()
    assert again.events("start")[-1]["program"] == event["program"] and len(again.events("replanned")) == 1
    assert len(again.rows()) == MORE and compare(run.folder).run.program.hash == event["program"]

    same = start_run(*LINE, f"run.steps={STEPS}", "schedule.replan=false", name="same")
    assert same.end() == 0, same.describe()
    assert [(row["loss"], row["grad_norm"]) for row in same.rows()] == [(row["loss"], row["grad_norm"]) for row in rows]
    expected = same.state(STEPS)
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)
