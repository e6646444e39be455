"""The trace file, by the rules of trace viewers' importers."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest
from profiles import events_of as profile_events
from trace_cases import measured, simulated

from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.simulate.step_profile import KERNEL
from pentad.schedules.simulate.timeline import Span, Timeline


def events_of(tmp_path: Path, *timelines: Timeline, names: dict[int, str] | None = None) -> list[dict]:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(trace_bytes(timelines, process_names=names))
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def bound(events: list[dict]) -> dict[int, list[str]]:
    """Arrow -> names of the slices it binds to. Viewers bind it to the slice of its thread that started last (at equal
    times, the last in the file) and has not ended."""
    last: dict[int, dict] = {}
    found: dict[int, list[str]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda event: event["ts"]):
        if event["ph"] == "X":
            last[event["tid"]] = event
        else:
            shown = last[event["tid"]]
            assert event["ts"] <= shown["ts"] + shown["dur"]
            assert event["ph"] == ("f" if found[event["id"]] else "s")
            found[event["id"]].append(f"{shown['pid']} {shown['name']}")
    return found


@pytest.mark.parametrize("transfer", [0.0, 7e-5])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe"])
def test_every_send_has_one_arrow_to_its_receive(tmp_path: Path, name: str, transfer: float) -> None:
    timeline = simulated(name, transfer)
    arrows = bound(events_of(tmp_path, timeline))
    expected = set()
    for span in timeline.spans:
        if span.op in ("SEND_F", "SEND_B"):
            stage = span.stage + (1 if span.op == "SEND_F" else -1)
            receive = f"{stage}{span.op.replace('SEND', 'RECV')}{span.microbatch}"
            expected.add((f"{1 + span.rank} {span.name}", f"{1 + span.peer} {receive}"))
    assert sorted(map(tuple, arrows.values())) == sorted(expected)


def test_arrows_do_not_cross_steps_or_timelines(tmp_path: Path) -> None:
    plan = simulated("1f1b")
    events = events_of(tmp_path, plan, measured(plan))
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == len({e["id"] for e in arrows}) == 3 * sum(span.op.startswith("SEND") for span in plan.spans)
    pid_groups = defaultdict(set)
    for event in events:
        if event["ph"] in "sf":
            pid_groups[event["id"]].add(event["pid"] // 10)
    assert all(len(groups) == 1 for groups in pid_groups.values())
    assert all(len(pair) == 2 for pair in bound(events).values())


def test_every_span_is_a_slice(tmp_path: Path) -> None:
    plan = simulated("1f1b")
    slices = [e for e in events_of(tmp_path, plan) if e["ph"] == "X"]
    found = {(e["pid"] - 1, e["name"], e["cat"], e["ts"], e["dur"]) for e in slices}
    expected = {
        (s.rank, s.name, s.op, round(s.start * 1e9) / 1e3, (round(s.end * 1e9) - round(s.start * 1e9)) / 1e3)
        for s in plan.spans
    }
    assert found == expected and len(slices) == len(plan.spans)
    first = next(e for e in slices if e["name"] == "1F2")
    assert first["args"] == {"stage": 1, "microbatch": 2, "step": 0}
    assert next(e for e in slices if e["name"] == "1SEND_F2")["args"]["peer"] == 2


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_slices_of_a_thread_never_overlap(tmp_path: Path, name: str) -> None:
    pair = [
        Span(9, 0, "compute", f"0{op}{op}", op, 0, 1, -1, start, start + 2.0)
        for op, start in (("F", 50.0), ("B", 51.0))
    ]
    plan = simulated(name)
    busy: dict[int, float] = {}
    count = 0
    for event in events_of(tmp_path, Timeline("simulated", plan.spans + tuple(pair)), measured(plan)):
        if event["ph"] == "X":
            assert event["ts"] >= busy.get(event["tid"], 0.0) - 1e-6
            busy[event["tid"]] = event["ts"] + event["dur"]
            count += 1
    assert count == 3 * len(plan.spans) + 2


def test_threads_and_processes_have_names_of_their_own(tmp_path: Path) -> None:
    plan = simulated("1f1b")
    names = {rank: f"rank {rank} (dp0 pp{rank})" for rank in range(4)}
    events = [e for e in events_of(tmp_path, plan, measured(plan), names=names) if e["ph"] == "M"]
    threads = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert len(threads) == len({tid for tid, _ in threads}) and all(tid > 0 for tid, _ in threads)
    assert {"compute", "SEND_F>2", "RECV_B<3", "reduce"} <= {name for _, name in threads}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"{source} {name}" for source in ("simulated", "measured") for name in names.values()]


def test_simulated_ranks_do_not_take_the_names_of_other_ranks(tmp_path: Path) -> None:
    names = {rank: f"rank {rank} (dp{rank % 2} pp{rank // 2})" for rank in range(8)}
    events = events_of(tmp_path, simulated("1f1b"), names=names)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {rank}" for rank in range(4)]


def test_equal_timelines_give_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a.gz", tmp_path / "b.gz"]
    for path in paths:
        plan = simulated("zb-h1")
        path.write_bytes(trace_bytes([plan, measured(plan)], process_names={0: "first"}))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_an_incomplete_recording_still_opens(tmp_path: Path) -> None:
    cut = Timeline("measured", tuple(span for span in simulated("1f1b").spans if span.start < 8e-3))
    assert all(len(pair) == 2 for pair in bound(events_of(tmp_path, cut)).values())
    assert events_of(tmp_path, Timeline("measured", ())) == []


def test_a_profile_is_below_the_lanes_of_its_rank_on_their_clock(tmp_path: Path) -> None:
    """Slices of a thread nest, and no two threads share a number."""
    spans = tuple(s._replace(start=s.start + 5e5, end=s.end + 5e5) for s in simulated("dualpipe").spans)
    profiles = {rank: profile_events([s for s in spans if s.rank == rank], kernels=True) for rank in (1, 2)}
    path = tmp_path / "trace.json.gz"
    path.write_bytes(trace_bytes([Timeline("measured", spans)], process_names=None, profiles=profiles))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == sum(e["name"] == "thread_name" for e in events)
    by_rank: dict[int, set[str]] = defaultdict(set)
    for event in (e for e in events if e["ph"] == "X"):
        by_rank[event["pid"] - 1].add(threads[event["tid"]])
    for rank, names in by_rank.items():
        assert {"kernels, stream 7", "operators, thread 1"}.issubset(names) == (rank in profiles)
    shown = [e for e in events if e["ph"] == "X" and threads[e["tid"]].startswith("kernels")]
    kernels = [event for its in profiles.values() for event in its if event.kind == KERNEL]
    zero = round(1e9 * min(s.start for s in spans))
    assert sorted(round(1e3 * e["ts"]) for e in shown) == sorted(each.start - zero for each in kernels)
    assert all(e["ts"] >= 0 for e in events if e["ph"] == "X")
