"""The timeline in Ray's dashboard returns what was pushed, stays small, and never disturbs a run."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2_grpc
from started_cluster import start_cluster

from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.monitoring import ray_timeline
from pentad.orchestrator.monitoring.ray_timeline import RayTimeline
from pentad.orchestrator.monitoring.run_state import RankView, RunView
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.mesh import Mesh

MESH = Mesh(dp=2, pp=2)
MICROSECOND = 1e-6


def view(mesh: Mesh = MESH) -> RunView:
    ranks = tuple(
        RankView(rank, mesh.coordinates(rank), "127.0.0.1", 1, -1, "running", 0, "", 0.0) for rank in range(mesh.size)
    )
    return RunView("x", "runs/x", "running", 0, 9, 0, str(mesh), "1f1b", "", ranks=ranks)


def made_up_step(step: int, seconds_ago: float = 0.04) -> tuple[Span, ...]:
    """A 40 ms step that began `seconds_ago`: F, B, W, an overlapped pair, the optimizer step, and concurrent
    transfers."""
    start = time.monotonic() - seconds_ago
    found = []
    for rank in range(MESH.size):
        ops = [("F", 0, 9), ("B", 9, 18.123), ("W", 18.123, 25), ("BW", 26, 31), ("F", 30, 34), ("NORM", 35, 36.5)]
        for number, (op, begin, end) in enumerate([*ops, ("STEP", 37, 40), ("SEND_F", 8, 12), ("RECV_B", 0, 30)]):
            lane = {"NORM": "reduce", "SEND_F": "SEND_F>1", "RECV_B": "RECV_B<1"}.get(op, "compute")
            times = (start + begin * 1e-3 + rank * 1e-5, start + end * 1e-3 + rank * 1e-5)
            found.append(Span(step, rank, lane, f"{rank}{op}{number}", op, rank, number, -1, *times))
    return tuple(found)


class Slice(NamedTuple):
    process: str
    thread: str
    name: str
    start: float
    seconds: float
    colour: str
    step: int


def assert_side_by_side(events: list[dict]) -> None:
    """Slices of a row must not overlap: Perfetto drops one that begins even a nanosecond before the previous one
    ends."""
    ends: dict[tuple[int, int], Decimal] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(row, 0)
        ends[row] = event["ts"] + event["dur"]


def slices(events: list[dict]) -> list[Slice]:
    """pentad's slices in a Ray trace, with their row titles."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        Slice(
            *(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], float(e["ts"]) / 1e6, float(e["dur"]) / 1e6),
            *(e["cname"], e["args"]["step"]),
        )
        for e in events
        if e["ph"] == "X" and e["args"]["func_or_class_name"] == "pentad.step"
    ]


def eventually(ask: Callable[[], Any], done: Callable[[Any], bool], seconds: float = 15) -> Any:
    until = time.monotonic() + seconds
    while not done(answer := ask()) and time.monotonic() < until:
        time.sleep(0.1)
    return answer


def assert_same_step(shown: list[Slice], spans: tuple[Span, ...]) -> None:
    wall = time.time() - time.monotonic()
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        row = [s for s in shown if (s.process, s.thread) == (f"Node pentad dp{at.dp}", f"worker:{rank:04d}")]
        by_name = {span.name: span for span in spans if span.rank == rank}
        expected = [f"{rank}{name}" for name in ("F0", "B1", "W2", "NORM5", "STEP6")]
        pair = f"{rank}BW3 + {rank}F4"
        assert sorted(s.name for s in row) == sorted([*expected, pair])
        for name, start, seconds in [(s.name, s.start, s.seconds) for s in row if s.name != pair]:
            assert start == pytest.approx(by_name[name].start + wall, abs=1e-3)  # the clock offset is read twice
            assert seconds == pytest.approx(by_name[name].end - by_name[name].start, abs=2 * MICROSECOND)
        shifts = [s.start - by_name[s.name].start for s in row if s.name != pair]
        assert max(shifts) - min(shifts) <= 2 * MICROSECOND
        colours = {s.name[1:]: s.colour for s in row}
        assert [colours[name] for name in ("F0", "B1", "W2")] == ["rail_response", "rail_idle", "rail_load"]


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["token", pytest.param("disabled", marks=pytest.mark.slow)])
def test_the_dashboard_returns_what_was_pushed(auth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_cluster(ClusterSection(device="cpu", auth=auth), 1) as cluster:
        job = ray.get_runtime_context().get_job_id()
        token = cluster.token_file.read_text() if cluster.token_file else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}

        def ask(path: str) -> Any:
            request = urllib.request.Request(f"{cluster.dashboard}/api/v0/{path}", headers=headers)
            return json.loads(urllib.request.urlopen(request, timeout=20).read(), parse_float=Decimal)

        def states() -> dict[str, str]:
            found = ask("tasks?detail=1")["data"]["result"]
            assert found["total"] == found["num_after_truncation"] == len(found["result"])  # Ray counts none as lost
            return {task["name"]: task["state"] for task in found["result"]}

        logged: list[str] = []
        timeline = RayTimeline(2, logged.append)
        timeline.on_ranks_placed(view())
        steps = [made_up_step(number, seconds_ago=0.5 - number / 10) for number in range(5)]
        timeline.on_steps([], steps)
        events = eventually(lambda: ask(f"tasks/timeline?job_id={job}"), lambda found: len(slices(found)) >= 48)
        assert_side_by_side(events)
        shown = slices(events)
        assert {s.step for s in shown} == {3, 4}
        assert [s.process for s in shown] == sorted(s.process for s in shown)
        assert_same_step([s for s in shown if s.step == 4], steps[4])
        assert states() == dict.fromkeys((f"step 4 {MESH.coordinates(rank)}" for rank in range(4)), "RUNNING")
        timeline.on_evaluation([{"step": 5}], made_up_step(5))
        timeline.close()
        names = [f"evaluation after 5 steps {MESH.coordinates(rank)}" for rank in range(4)]
        assert eventually(states, lambda found: "FINISHED" in found.values()) == dict.fromkeys(names, "FINISHED")
        assert logged == []
        monkeypatch.setattr(ray_timeline, "_channel", lambda: grpc.insecure_channel("127.0.0.1:1"))
        assert_logged_once(r"is incomplete: UNAVAILABLE: .*127\.0\.0\.1:1")


def assert_logged_once(sentence: str) -> None:
    logged: list[str] = []
    timeline = RayTimeline(2, logged.append)
    timeline.on_ranks_placed(view())
    for number in range(3):
        timeline.on_steps([], [made_up_step(number)])
        timeline.on_view(view())
    timeline.close()
    timeline.close()
    assert len(logged) == 1 and re.search(sentence, logged[0]), logged


class OtherInterface:
    """A stub of a Ray version with a different interface."""

    def __init__(self, channel: object) -> None:
        pass


def test_a_missing_interface_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_timeline, "_channel", lambda: contextlib.nullcontext())
    monkeypatch.setattr(gcs_service_pb2_grpc, "TaskInfoGcsServiceStub", OtherInterface)
    assert_logged_once("is incomplete: AttributeError: .*AddTaskEventData")


def test_without_ray_nothing_is_raised_or_started() -> None:
    assert_logged_once("is incomplete: ")
    assert not ray.is_initialized()


def test_a_stalled_push_does_not_block_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, go = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go.wait(30)
        raise OSError("at last")

    monkeypatch.setattr(ray_timeline, "_channel", stall)
    monkeypatch.setattr(ray_timeline, "TIMEOUT_SECONDS", 0.2)
    timeline = RayTimeline(2, lambda text: None)
    timeline.on_ranks_placed(view())
    began = time.monotonic()
    for number in range(100):
        timeline.on_steps([], [made_up_step(number)])
    assert stalled.wait(5)
    timeline.close()
    assert time.monotonic() - began < 5
    assert len(timeline._pending) <= 2
    go.set()


def test_keeping_no_steps_publishes_nothing() -> None:
    timeline = RayTimeline(0, pytest.fail)
    timeline.on_ranks_placed(view())
    timeline.on_steps([], [made_up_step(0)])
    timeline.close()
    assert timeline._thread is None


@pytest.mark.parametrize(
    ("spans", "keep", "ranks", "tasks"),
    [(100, 5, 4, 1), (300, 5, 4, 2), (400, 5, 4, 3), (2000, 5, 4, 5), (2000, 5, 50, 2), (100, 5, 4000, 1)],
)
def test_a_rank_has_as_many_tasks_as_its_steps_need(spans: int, keep: int, ranks: int, tasks: int) -> None:
    assert ray_timeline._tasks_per_rank(spans, keep, ranks) == tasks


@pytest.mark.parametrize(
    ("rank", "title"), [(0, "0000"), (3, "0003"), (120, "0120"), (9999, "9999"), (12345, "012345")]
)
def test_a_row_title_names_its_rank(rank: int, title: str) -> None:
    assert ray_timeline._thread_id(rank).hex() == title


def test_rows_are_kept_when_the_mesh_shrinks() -> None:
    timeline = RayTimeline(2, pytest.fail)
    timeline.on_ranks_placed(view())
    assert {row.name: row.number for row in timeline._rows.values()} == {
        **{"dp0 pp0": 0, "dp0 pp1": 1},
        **{"dp1 pp0": 2, "dp1 pp1": 3},
    }
    timeline.on_ranks_placed(view(Mesh(dp=1, pp=2)))
    assert {row.name: row.number for row in timeline._rows.values()} == {"dp0 pp0": 0, "dp0 pp1": 1}
