"""The page of a run whose ranks exchange messages inside layers: what it says about each op and stage."""

from __future__ import annotations

from collections import defaultdict

import pytest
from html_pages import assert_holds, payload
from layered_run import LayeredRun, layered_run

from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.simulation.layer_spans import LANE, with_layer_spans
from pentad.schedules.diagnosis.attribution import LayerWait, Measured, attribute
from pentad.schedules.simulate.read_costs import read_costs

RECOMPUTED = ("memory.recompute=full", "schedule.name=zb-h1")


@pytest.fixture(params=[(), RECOMPUTED], ids=["1f1b", "zb-h1, recomputed"])
def run(request: pytest.FixtureRequest) -> LayeredRun:
    return layered_run(*request.param)


def test_messages_are_sent_once_for_each_op_and_stage(run: LayeredRun) -> None:
    data = payload(run.page())
    rows = [tuple(row[:3]) for row in data["programs"][0]["messages"]]
    ran = {(span.op, span.stage, "tp") for span in run.simulated.spans if span.op in ("F", "B", "BW", "RECOMPUTE")}
    assert len(rows) == len(set(rows)) and set(rows) == ran
    assert data["looks"]["LAYERS"]["label"] == "exposed messages inside layers"
    assert_holds(data, data["panels"][1], run.simulated)  # only spans of instructions


def test_the_page_hardly_grows(run: LayeredRun) -> None:
    assert len(run.page()) < 1.02 * len(run.page(messages=False))


def test_a_simulated_step_has_what_explain_says_of_ranks_that_wait_so_long(run: LayeredRun) -> None:
    """Compute, and what it waits for inside layers, add up to the same on the page, in traces and in `--explain`."""
    plan, simulated = run.plan, run.simulated
    planned = {tuple(row[:2]): row[3:] for row in payload(run.page())["programs"][0]["messages"]}
    compute, exposed, waits = (
        defaultdict[int, float](float),
        defaultdict[int, float](float),
        defaultdict[int, float](float),
    )
    for span in simulated.spans:
        takes, waited, _ = planned.get((span.op, span.stage), (1, 0, 0))
        exposed[span.rank] += (span.end - span.start) * waited / takes
        if span.op in ("F", "B", "W", "BW", "RECOMPUTE"):
            compute[span.rank] += (span.end - span.start) * (1 - waited / takes)
    for span in with_layer_spans(simulated, plan, costs_of(plan)).spans:
        waits[span.rank] += (span.end - span.start) * (span.lane == LANE and not span.name.endswith("hidden"))
    costs = read_costs(plan.program, simulated)
    assert costs is not None
    measured = Measured(layers={rank: LayerWait(seconds, 0.0) for rank, seconds in waits.items()})
    for rank in attribute(plan.program, plan.mesh, simulated, costs, measured):
        assert rank.parts["inside layers"] / 1e9 == pytest.approx(exposed[rank.rank], rel=1e-6)
        assert rank.parts["compute"] / 1e9 == pytest.approx(compute[rank.rank], rel=1e-6)
        assert exposed[rank.rank] > 0.05 * compute[rank.rank]


def test_without_messages_inside_layers_the_legend_does_not_name_them() -> None:
    data = payload(layered_run("mesh.tp=1").page())
    assert data["programs"][0]["messages"] == [] and "LAYERS" not in data["looks"]
