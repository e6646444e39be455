"""From a run's folder, `pentad timeline` draws what the run itself drew: messages inside layers and planned memory. It
executes no file that the configuration names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from commands import Pentad
from html_pages import payload

from pentad.orchestrator.api.comparison import compare
from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.page.ended_run import EndedRun
from pentad.orchestrator.page.saved_plan import saved_plan
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks

LAYERED = ("mesh.tp=2", "mesh.pp=2", "model.hidden=256", "model.heads=4", "model.kv_heads=4")
EXPERTS = (
    *("model.family=mixtral", "model.experts.num_experts=4", "model.experts.top_k=2"),
    *("model.experts.intermediate_size=128", "mesh.ep=2", "mesh.pp=2", "zero.stage=1", "schedule.name=1f1b"),
)
RUNS = {
    "tp": ("cpu", 1, LAYERED),
    "recompute": ("cuda", 1, (*LAYERED, "schedule.name=1f1b", "memory.recompute=[mlp]", "cluster.gpu=NVIDIA H200")),
    "ep on two hosts": ("cuda", 2, (*EXPERTS, "mesh.dp=2", "batch.global_batch_size=32", "cluster.gpu=NVIDIA H200")),
    "cp": ("cpu", 1, ("mesh.cp=2", "mesh.pp=2", "schedule.name=zb-v", "memory.recompute=full")),
}


def finished(folder: Path, device: str, hosts: int, *words: str) -> Path:
    """The folder of a run on this many hosts that has measured a step."""
    config = load(None, [f"run.folder={folder}", "run.name=trial", "run.steps=4", *words])
    size = config.mesh.size
    on = tuple(rank * hosts // size for rank in range(size))
    plan = make_plan(config, device, hosts=on if device == "cuda" else None)
    where: list[dict[str, Any]] = [
        {"rank": rank, "node": f"10.0.0.{host}", "gpu": rank if device == "cuda" else -1, "pid": 1}
        for rank, host in enumerate(on)
    ]
    with RunFolder(config, plan) as opened:
        opened.event("start", generation=1)
        opened.event("place", generation=1, ranks=where)
        opened.timelines(measured_by(plan.program, plan), costs_of(plan))
        if plan.eval is not None:
            opened.eval_timeline(measured_by(plan.eval.program, plan))
        opened.event("end", step=4)
        opened.files.settle()
        return opened.path


def measured_by(program: Program, plan: Any) -> Timeline:
    spans: list[Span] = [*to_mesh_ranks(simulate(program, costs_of(plan), step=3), plan.mesh).spans]
    return Timeline("measured", tuple(spans))


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "cp")) for c in RUNS])
def test_the_page_and_the_trace_are_those_that_the_run_wrote(tmp_path: Path, case: str) -> None:
    device, hosts, words = RUNS[case]
    folder = finished(tmp_path, device, hosts, *words)
    found, own = compare(folder), (folder / "timeline.html").read_text()
    (program,) = payload(own)["programs"]
    assert any(exposed for *_, exposed, _ in program["messages"]) and program["memory"]["in_bytes"]
    assert payload(found.html()) == payload(own)
    found.write_trace(tmp_path / "trace.json.gz")
    own_events, events = (
        json.loads(gzip.decompress((each / "trace.json.gz").read_bytes()))["traceEvents"] for each in (folder, tmp_path)
    )
    axis = next(each for each in ("tp", "cp", "ep") if f"mesh.{each}=2" in words)
    assert events == own_events and any(f" {axis} " in each["name"] for each in events)


def test_an_evaluation_has_the_messages_of_its_forwards(tmp_path: Path) -> None:
    folder = finished(tmp_path, "cpu", 1, *LAYERED, "eval.every=2")
    (program,) = payload(compare(folder, evaluation=True).html())["programs"]
    (training,) = payload(compare(folder).html())["programs"]
    assert program["messages"] == [row for row in training["messages"] if row[0] == "F"] != []
    assert program["memory"] is None


def test_a_custom_model_costs_the_messages_and_a_line(tmp_path: Path, pentad: Pentad) -> None:
    folder, file, page = finished(tmp_path, "cpu", 1, *LAYERED), tmp_path / "own.py", tmp_path / "page.html"
    file.write_text("raise SystemExit('executed')\n")
    sections: dict[str, dict[str, Any]] = {"model": {"custom": f"{file}:model"}, "mesh": {"tp": 1, "dp": 2}}
    (folder / "config.yaml").write_text(dump(load(load(folder / "config.yaml"), sections=sections)))
    status, out, err = pentad("timeline", str(folder), "--html", str(page))
    why = f"model.custom is {file}:model, whose file is not executed here"
    assert (status, err) == (0, "") and f" without planned bytes and messages inside layers, as {why}\n" in out
    assert not payload(page.read_text())["programs"][0]["messages"] and f"none, as {why}" in page.read_text()


def test_the_program_of_a_custom_schedule_is_read(tmp_path: Path) -> None:
    """Its file is not executed."""
    folder, file = finished(tmp_path, "cpu", 1, *LAYERED), tmp_path / "own.py"
    expected = payload(compare(folder).html())
    file.write_text("raise SystemExit('executed')\n")
    config = load(load(folder / "config.yaml"), sections={"schedule": {"name": f"{file}:order"}})
    (folder / "config.yaml").write_text(dump(config))
    assert payload(compare(folder).html()) == expected
    assert EndedRun(folder).bus.folder.plan.program.streams == Program.load(folder / "program.arrow").streams


def test_another_program_than_the_plan_has_is_not_explained_by_it(tmp_path: Path) -> None:
    folder = finished(tmp_path, "cpu", 1, *LAYERED)
    other = make_plan(load(folder / "config.yaml", ["schedule.microbatches=4", "schedule.name=1f1b"]), "cpu").program
    plan, why = saved_plan(folder, other)
    assert plan is None and why.startswith("config.yaml is planned with other stages, units or microbatches")
