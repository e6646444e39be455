"""A run's HTML page, figure and trace show each measured step next to a simulation with that step's measured costs."""

import gzip
import json
from pathlib import Path

import pytest
from html_pages import payload

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.comparison import comparison_svg, simulate_steps
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks
from pentad.schedules.spec.plan import Plan

SLOWDOWN = {3: 1.0, 4: 2.5}  # by measured step


def measured_by(plan: Plan) -> Timeline:
    """The planned step, repeated for each step of SLOWDOWN, on a different clock."""
    planned = to_mesh_ranks(simulate(plan.program, costs_of(plan)), plan.mesh)
    return Timeline(
        "measured",
        tuple(
            span._replace(step=step, start=1000 * step + slow * span.start, end=1000 * step + slow * span.end)
            for step, slow in SLOWDOWN.items()
            for span in planned.spans
        ),
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = load(None, [f"run.folder={tmp_path}", "run.name=trial", "mesh.dp=2"])
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.timelines(measured_by(folder.plan), costs_of(folder.plan))
    return folder


def test_the_page_simulates_every_measured_step(run: RunFolder) -> None:
    measured, simulated = payload((run.path / "timeline.html").read_text())["panels"]
    assert [measured["source"], simulated["source"]] == ["measured", "simulated"]
    assert [step["step"] for step in simulated["steps"]] == [step["step"] for step in measured["steps"]] == [3, 4]
    for one, other in zip(simulated["steps"], measured["steps"], strict=True):
        assert one["makespan"] == pytest.approx(other["makespan"], rel=1e-3)
        assert len(one["ranks"]) == len(other["ranks"]) == 8


def test_a_step_missing_an_op_is_simulated_with_the_given_costs(run: RunFolder) -> None:
    plan, measured = run.plan, measured_by(run.plan)
    torn = Timeline("measured", tuple(s for s in measured.spans if (s.step, s.op, s.stage) != (3, "W", 1)))
    simulated = simulate_steps(plan, torn, costs_of(plan))
    planned = simulate(plan.program, costs_of(plan))
    assert simulated.of_step(3).makespan == pytest.approx(planned.makespan, rel=1e-12)
    assert simulated.of_step(4).makespan == pytest.approx(measured.of_step(4).makespan, rel=1e-3)


def test_the_trace_includes_the_simulated_last_step(run: RunFolder) -> None:
    events = json.loads(gzip.decompress((run.path / "trace.json.gz").read_bytes()))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    steps: dict[str, set[int]] = {"measured": set(), "simulated": set()}
    for event in events:
        if event["ph"] == "X":
            steps[processes[event["pid"]].partition(" ")[0]].add(event["args"]["step"])
    assert steps == {"measured": {3, 4}, "simulated": {4}}


def test_the_figure_shows_a_step(run: RunFolder) -> None:
    measured = measured_by(run.plan)
    simulated = simulate_steps(run.plan, measured, costs_of(run.plan))
    text = comparison_svg(run.plan, measured.of_step(4), simulated.of_step(4))
    assert "Measured, step 4" in text and "trial: zb-h2, 8 microbatches" in text
    assert text.count("rank 7") == 2
