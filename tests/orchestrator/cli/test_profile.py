"""`pentad timeline --profile`: the kernels of a profiled step by op, and in a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from commands import Pentad
from profiles import profile_of_spans

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.profiles import save_profile
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with measurements of steps 3 and 4 and profiles of steps 1 and 4; those of step 1 are no longer kept."""
    config = load(None, [f"run.folder={tmp_path / 'runs'}", "run.name=trial", "metrics.profile_steps=[1,4]"])
    plan = make_plan(config, "cpu")
    costs = costs_of(plan)
    spans = simulate(plan.program, costs).spans
    steps = {step: [span._replace(step=step) for span in spans] for step in (1, 3, 4)}
    with RunFolder(config, plan) as folder:
        folder.timelines(Timeline("measured", (*steps[3], *steps[4])), costs)
        save_profile(folder.path, profile_of_spans(1, steps[1], kernels=False))
        save_profile(folder.path, profile_of_spans(4, steps[4]))
    return folder.path


def test_the_newest_profiled_step_is_shown_and_written_as_a_trace(pentad: Pentad, run: Path) -> None:
    status, out, err = pentad("timeline", "trial", "--profile")
    assert (status, err) == (0, "")
    assert "step 4 of trial, profiled: kernels of 4 ranks together" in out and "gemm<bf16>" in out
    path = Path("runs") / "trial" / "profiles" / "step-4" / "trace.json.gz"
    assert f"written to {path}" in out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    kernels = [event for event in slices if threads[event["tid"]] == "kernels, stream 7"]
    instructions = {(event["pid"], event["name"]): event for event in slices if threads[event["tid"]] == "compute"}
    assert len(kernels) == len(instructions) > 0
    for kernel in kernels:
        around = instructions[kernel["pid"], kernel["args"]["instruction"]]
        assert around["ts"] < kernel["ts"] and kernel["ts"] + kernel["dur"] <= around["ts"] + around["dur"] + 0.002


def test_the_facts_add_up_by_op(pentad: Pentad, run: Path) -> None:
    facts = json.loads(pentad("timeline", "trial", "--profile", "--step", "1", "--trace", "a.json.gz", "--json")[1])
    assert facts["step"] == 1 and facts["trace"] == "a.json.gz" and Path("a.json.gz").stat().st_size > 100
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1, 2, 3]
    assert {"F", "B", "W"} <= {each["op"] for each in facts["ops"]}
    for op in facts["ops"]:
        assert sum(kernel["seconds"] for kernel in op["kernels"]) == pytest.approx(op["seconds"])
        assert sum(kernel["share"] for kernel in op["kernels"]) == pytest.approx(1) or not op["seconds"]
        assert {kernel["name"] for kernel in op["kernels"]} == {"aten::mm", "outside operators"}


def test_a_step_is_explained_with_its_kernels(pentad: Pentad, run: Path) -> None:
    status, out, err = pentad("timeline", "trial", "--explain", "--profile")
    assert (status, err) == (0, "") and "schedule bubble" in out and "gemm<bf16>" in out
    assert not (run / "profiles" / "step-4" / "trace.json.gz").exists()
    facts = json.loads(pentad("timeline", "trial", "--explain", "--profile", "--json")[1])
    assert facts["step"] == facts["profile"]["step"] == 4 and "parts" in facts
    status, _, err = pentad("timeline", "trial", "--explain", "--profile", "--step", "1")
    assert (status, err) == (1, "pentad: --step is 1: expected a measured step, 3, 4\n")


@pytest.mark.parametrize("option", [("--html", "a.html"), ("--svg", "a.svg"), ("--eval",)])
def test_options_that_are_of_other_steps_are_refused(pentad: Pentad, run: Path, option: tuple[str, ...]) -> None:
    status, _, err = pentad("timeline", "trial", "--profile", *option)
    assert (status, err.count("\n")) == (1, 1) and f"{option[0]} is given: expected --profile without it" in err


def test_a_run_without_profiled_steps_names_the_key(pentad: Pentad, run: Path) -> None:
    status, _, err = pentad("timeline", "trial", "--profile", "--step", "3")
    assert (status, err) == (1, "pentad: --step is 3: expected a profiled step, 1, 4\n")
    for step in (1, 4):
        (run / "profiles" / f"step-{step}" / "profile.json").unlink()
    status, _, err = pentad("timeline", "trial", "--profile")
    assert (status, err.count("\n")) == (1, 1) and "has completed a step of metrics.profile_steps = [1, 4]" in err
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("profile_steps: [1, 4]", "profile_steps: []"))
    status, _, err = pentad("timeline", "trial", "--profile")
    assert (status, err.count("\n")) == (1, 1)
    assert "has no profiled step: expected a run with metrics.profile_steps, such as [20, 21]" in err
