"""A slow rank is reported in the terminal, the journal and the status, and shown in a heat map."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.diagnosis.slow_ranks import SlowRankWatch, sentence
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.rank_times import load as load_times
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks
from pentad.workers.runtime.telemetry import GpuState


def test_a_slow_rank_is_reported_and_drawn(tmp_path: Path) -> None:
    config = load(None, [f"run.folder={tmp_path}", "run.name=trial", "run.steps=40", "mesh.dp=2", "mesh.pp=2"])
    plan, console = make_plan(config, "cpu"), Console(file=StringIO(), width=200)
    with RunFolder(config, plan) as folder:
        bus = EventBus(config, folder, Display(console, "trial", 40), 0, None)
        bus.watchers.append(SlowRankWatch(bus))
        for step in range(40):
            times = [RankTime(step, rank, "F", rank // 2, 1.0 + (rank == 3 and step >= 15) * 0.2) for rank in range(4)]
            row = {**dict.fromkeys(METRIC_KEYS, 1.0), "step": step, "generation": 1, "skipped": False}
            bus.steps_done([row | {"rank_times": tuple(times)}], [()])
        found = [entry for entry in read_lines(folder.path / "journal.jsonl") if entry["event"] == "slow rank"]
        spans = to_mesh_ranks(simulate(plan.program, costs_of(plan), step=39), plan.mesh).spans
        folder.timelines(Timeline("measured", spans), costs_of(plan))
    assert [(entry["kind"], entry["ranks"], entry["since"]) for entry in found] == [("compute", [3], 15)]
    assert 15 < found[0]["step"] < 25
    assert [(slow.ranks, slow.step) for slow in bus.lasting_slow_ranks] == [((3,), 39)]
    assert "rank 3 computes 20 % longer than its peers since step 15: F of stage 1 +20 %" in bus.view.verdict
    assert bus.view.verdict in console.file.getvalue()  # type: ignore[attr-defined]
    drawing = (folder.path / "rank-times.svg").read_text()
    assert ElementTree.fromstring(drawing).tag.endswith("svg") and drawing.count("rank 3 (dp1 pp1)") == 1
    assert "data:image/svg+xml;base64," in (folder.path / "timeline.html").read_text()
    assert len(load_times(folder.path / "rank-times.arrow")) == 160
    assert all("rank_times" not in row for row in read_lines(folder.path / "metrics.jsonl"))


def test_a_sentence_has_what_the_gpu_reports() -> None:
    gpus = {rank: GpuState(clock=1.7e9, throttles=()) for rank in range(3)}
    gpus[3] = GpuState(clock=1.2e9, throttles=("thermal",))
    found = sentence(SlowRank("compute", (3,), 20, 12, 0.15, (("BW", 1, 0.16),)), (), gpus)
    assert found == (
        "rank 3 computes 15 % longer than its peers since step 12: BW of stage 1 +16 %, throttled (thermal), "
        "its clock is 1200 MHz, that of others 1700 MHz"
    )
    starved = sentence(SlowRank("starved", (3,), 20, 12, 0.52), (), gpus)
    assert starved == (
        "rank 3 is ready to run, and waits for a core 52 % of a step's compute longer than others since step 12: "
        "its host is busy with other processes"
    )
    over = sentence(SlowRank("starved", (3,), 30, 12, 0.52, over=True), (), gpus)
    assert over == "the host of rank 3 is no longer busy with other processes"
    link = sentence(SlowRank("link", (0, 1), 20, 12, 0.15), (), {})
    assert link == "transfers from rank 0 to rank 1 take 15 % of a step's compute longer than others since step 12"
