"""Data of the page: ranks and whom they wait for, curves, kept steps, events; across rewinds and generations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from html_pages import payload
from page_run import HOSTILE, PageRun, page_run

from pentad.orchestrator.monitoring.comparison import DrawnRun, comparison_page, simulate_steps
from pentad.orchestrator.page.drawing import rank_times_svg
from pentad.orchestrator.page.step_curves import MOST_POINTS, StepCurves
from pentad.orchestrator.planning.comm_volume import CommKind, comm_volume
from pentad.orchestrator.planning.estimate import costs_of
from pentad.schedules.diagnosis.rank_rows import svg_rank_times
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.errors import PentadError
from pentad.workers.runtime.telemetry import GpuState


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PageRun]:
    with page_run(tmp_path) as made:
        yield made


def test_a_rank_is_shown_with_whom_it_waits_for(run: PageRun) -> None:
    run.stall()
    ranks = run.data.state()["ranks"]
    assert [(rank["rank"], rank["dp"], rank["pp"], rank["state"]) for rank in ranks] == [
        (0, 0, 0, "running"),
        (1, 1, 0, "running"),
        (2, 0, 1, "running"),
        (3, 1, 1, "running"),
    ]
    waits = {rank["rank"]: rank["waits"] for rank in ranks}
    assert waits[1] == {"for": (3,), "what": "0RECV_B0", "axis": ""}
    assert waits[3] is None
    run.place(generation=2)  # of whose ranks nothing is known yet
    assert all(rank["waits"] is None for rank in run.data.state()["ranks"])


def test_the_flow_is_what_the_program_sends(run: PageRun) -> None:
    flow, program = run.data.state()["flow"], run.plan.program
    count = program.microbatches
    assert [(send["from"], send["to"], send["op"], send["count"]) for send in flow["sends"]] == [
        (0, 1, "SEND_F", count),
        (1, 0, "SEND_B", count),
    ]
    assert flow["sends"][0]["bytes"] == comm_volume(run.plan, 0)[CommKind("pp", "SEND_F")].bytes
    assert {(each["pp"], each["axis"], each["kind"]) for each in flow["collectives"]} == {
        (0, "dp", "ALL_REDUCE"),
        (1, "dp", "ALL_REDUCE"),
    }


def test_curves_go_on_where_a_former_driver_stopped_and_follow_a_rewind(tmp_path: Path) -> None:
    with page_run(tmp_path, first=3) as run:
        run.run(3, 4, 5)
        assert run.data.state()["curves"]["step"] == [0, 1, 2, 3, 4, 5]
        assert run.data.state()["curves"]["loss"][:3] == [None] * 3
        run.bus.rewind(5)
        run.run(5, generation=2)
        assert run.data.state()["curves"]["step"] == [0, 1, 2, 3, 4, 5]
        run.bus.rewind(2)
        assert run.data.state()["curves"]["step"] == [0, 1]


def test_a_rewind_before_anybody_looked(tmp_path: Path) -> None:
    with page_run(tmp_path, first=3) as run:
        run.run(3)
        run.bus.rewind(1)
        run.run(1, 2, generation=2)
        assert run.data.state()["curves"]["step"] == [0, 1, 2]


def test_long_curves_are_means_of_few_windows() -> None:
    points = StepCurves({"step": step, "loss": float(step % 2), "grad_norm": None} for step in range(100_000)).points()
    assert len(points["step"]) <= MOST_POINTS and points["width"] == 250
    assert set(points["loss"]) == {0.5} and set(points["grad_norm"]) == {None}
    assert points["step"][:2] == [0, 250]


def test_the_last_steps_are_drawn_as_timelines(run: PageRun) -> None:
    with pytest.raises(PentadError, match="no step has been measured yet"):
        run.data.timeline_html()
    run.run(*range(8))
    assert run.data.state()["kept"] == [3, 4, 5, 6, 7]
    panels = payload(run.data.timeline_html())["panels"]
    assert [panel["source"] for panel in panels] == ["measured", "simulated"]
    assert [[step["step"] for step in panel["steps"]] for panel in panels] == [[3, 4, 5, 6, 7]] * 2
    first = run.data.timeline_html()
    assert run.data.timeline_html() is first  # drawn only once
    run.place(generation=2)
    assert run.data.state()["kept"] == []


def test_a_long_call_keeps_the_steps_that_it_has_spans_of(run: PageRun) -> None:
    run.run(*range(30), together=True)
    state = run.data.state()
    assert state["kept"] == [25, 26, 27, 28, 29] and state["curves"]["step"] == list(range(30))


def test_memory_and_slow_ranks_are_drawn(run: PageRun) -> None:
    with pytest.raises(PentadError, match="no rank has peers with measured times"):
        run.data.rank_times_svg()
    assert "at the costs of the planner" in run.data.memory_html()
    run.run(0, 1)
    assert "at the costs of step 1" in run.data.memory_html()
    assert run.data.rank_times_svg().count("rank 3 (dp1 pp1)") == 1


def test_events_are_recoveries_and_what_else_is_rare(run: PageRun) -> None:
    run.bus.record("lost", rank=1, fault="killed")
    run.bus.record("checkpoint", step=4)
    run.bus.record("recovered", seconds=2.5, mesh=HOSTILE)
    assert [event["event"] for event in run.data.state()["events"]] == ["lost", "recovered"]


def test_the_load_of_experts_is_relative_to_its_layer(run: PageRun) -> None:
    assert not run.data.state()["has_experts"]
    run.run(0)
    assert run.data.state()["has_experts"]
    layers = [{"layer": 1, "load": [3.0, 1.0, 0.0, 0.0]}, {"layer": 2, "load": [1.0] * 4}]
    assert run.data.experts() == {"step": 0, "layers": layers}
    run.run(1, 2, loads=())
    assert run.data.experts()["step"] == 0  # kept until ranks report others


@pytest.mark.quiet
def test_figures_of_many_spans_are_drawn_in_another_process(tmp_path: Path) -> None:
    """The driver, which keeps the ranks busy, takes a fraction of the time that drawing itself would take it. Threads
    that earlier tests have left do not count."""
    with page_run(tmp_path, "mesh.pp=4", "schedule.microbatches=32", "batch.global_batch_size=64") as run:
        run.run(*range(5))
        plan, measured = run.data._measured()
        times = [RankTime(step, rank, "F", rank // 2, 1.0) for step in range(500) for rank in range(8)] * 4
        began = time.thread_time()
        page = comparison_page(DrawnRun.of_plan(plan), measured, simulate_steps(plan, measured, costs_of(plan)))
        figure = svg_rank_times(times, plan.mesh, title="")
        here = time.thread_time()
        assert run.data.timeline_html() == page and rank_times_svg(times, plan.mesh, "") == figure != ""
        print(f"here {here - began:.3f} s, {time.thread_time() - here:.3f} s with a process")
        assert time.thread_time() - here < 0.5 * (here - began)


def test_the_newest_step_has_the_clocks_of_its_gpus(run: PageRun) -> None:
    run.bus.set_state("running")
    run.run(0)
    assert run.data.state()["newest"]["clocks"] == ""
    run.bus.gpus = {0: GpuState(power=690.0, clock=1.5e9, clock_most=2e9, throttles=("power",))}
    run.run(1)
    assert run.data.state()["newest"]["clocks"] == "1,500 of 2,000 MHz and 690 W; the power limit holds down 1 of 1"


def test_the_time_left_is_that_of_the_last_steps_while_the_run_continues(run: PageRun) -> None:
    assert run.data.state()["seconds_left"] is None and run.data.state()["newest"] is None
    run.bus.set_state("running")
    run.run(0, 1, 2)  # three of 40 steps, a second each
    found = run.data.state()
    assert found["seconds_left"] == 37.0 and found["newest"]["step_seconds"] == found["newest"]["bubble_planned"] == 1.0
    run.bus.set_state("paused")
    assert run.data.state()["seconds_left"] is None
