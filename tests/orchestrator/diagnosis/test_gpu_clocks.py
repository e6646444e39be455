"""The clocks of a run's GPUs: from NVML into metrics.jsonl, and from there into the explanation of a step."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pentad.orchestrator.api.explanation import explain
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.diagnosis.remedies import remedy_of_clocks
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.gpu_clocks import GpuClocks, clocks_in, clocks_of, row_of
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.workers.runtime.telemetry import THROTTLES, GpuState

FREE = GpuState(power=500.0, clock=1.8e9, clock_most=2e9, throttles=())
HELD = GpuState(power=700.0, clock=1.4e9, clock_most=2e9, throttles=("power",))
BOTH = GpuClocks(2, 1.6e9, 2e9, 600.0, {"power": 1})
LLAMA = ("cluster.device=cuda", "cluster.gpu=NVIDIA H200", "model.hidden=256", "model.heads=2", "model.kv_heads=2")


def test_clocks_are_means_over_the_gpus_that_report_them() -> None:
    assert clocks_of([FREE, GpuState(), HELD, GpuState(clock=1e9, clock_most=2e9)]) == BOTH
    assert clocks_of([GpuState(power=700.0)]) is None and row_of([]) == {}
    assert clocks_in(row_of([FREE, HELD])) == BOTH and clocks_in({}) is None


def test_a_clock_that_nothing_holds_down_makes_no_step_longer() -> None:
    free = clocks_of([FREE])
    assert free is not None and (free.slowdown, free.reason) == (1.0, "")
    assert (BOTH.slowdown, BOTH.reason) == (1.25, "power")
    assert str(free) == "1,800 of 2,000 MHz and 500 W"
    assert str(BOTH) == "1,600 of 2,000 MHz and 600 W; the power limit holds down 1 of 2"


def recorded(folder: Path, gpus: dict[int, GpuState], *words: str) -> RunFolder:
    """A run of one measured step, with these GPUs."""
    config = load(None, [f"run.folder={folder}", "run.name=trial", "mesh.pp=2", *words])
    plan, console = make_plan(config, "cpu"), Console(file=StringIO())
    costs = costs_of(plan)
    spans = simulate(plan.program, costs).spans
    facts = {"step": 0, "generation": 1, "skipped": False, "step_seconds": max(span.end for span in spans)}
    with RunFolder(config, plan) as run:
        bus = EventBus(config, run, Display(console, "trial", 1), 0, None)
        bus.gpus = gpus
        row: dict[str, Any] = dict.fromkeys(METRIC_KEYS, 1.0)
        bus.steps_done([row | facts], [()])
        run.timelines(Timeline("measured", spans), costs)
    return run


def test_every_step_is_recorded_with_the_clocks_of_its_gpus(tmp_path: Path) -> None:
    (row,) = read_lines(recorded(tmp_path / "gpus", {0: FREE, 1: HELD}).path / "metrics.jsonl")
    assert clocks_in(row) == BOTH
    (row,) = read_lines(recorded(tmp_path / "cpus", {}).path / "metrics.jsonl")
    assert "gpus" not in row


def test_a_step_is_explained_by_what_holds_its_clocks_down(tmp_path: Path) -> None:
    found = explain(recorded(tmp_path, {0: FREE, 1: HELD}).path)
    assert found.clocks == BOTH and found.facts()["gpus"]["throttled"] == {"power": 1}
    (cause,) = (each for each in found.remedies if "clock" in each.cause)
    assert cause.cause == "the power limit holds the GPUs at 80.0 % of their highest clock"
    compute = max(step.parts["compute"] for step in found.ranks) / 1e9
    assert 0.15 * compute < cause.seconds <= 0.2001 * found.seconds
    assert f"GPUs at {BOTH}" in str(found)


def test_without_throttled_gpus_clocks_are_no_cause(tmp_path: Path) -> None:
    found = explain(recorded(tmp_path, {0: FREE}).path)
    assert found.clocks is not None and all("clock" not in each.cause for each in found.remedies)


REMEDIES = {
    "an FP8 recipe fits": (BOTH, LLAMA, "precision.matmul=fp8-tensor, whose GEMMs take less energy; or a higher limit"),
    "FP8 is used": (BOTH, (*LLAMA, "precision.matmul=fp8-tensor"), "a higher limit"),
    "the GPU has no FP8": (BOTH, (*LLAMA, "cluster.gpu=NVIDIA A100-SXM4-80GB"), "a higher limit"),
    "the sizes do not divide": (BOTH, ("cluster.device=cuda", "model.ffn=100"), "a higher limit"),
    "heat": (GpuClocks(1, 1e9, 2e9, 400.0, {"thermal": 1}), LLAMA, "better cooling"),
    "hardware": (GpuClocks(1, 1e9, 2e9, 400.0, {"hardware": 1}), LLAMA, "look at power cables"),
    "another reason": (GpuClocks(1, 1e9, 2e9, 400.0, {"magnetism": 1}), LLAMA, "see `nvidia-smi"),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_a_remedy_fits_the_reason_and_the_configuration(case: str) -> None:
    clocks, words, expected = REMEDIES[case]
    config: RunConfig = load(None, words)
    found = remedy_of_clocks(clocks, config, make_plan(config, "cuda"), 0.25)
    assert found.remedy.startswith(expected) and found.seconds == 0.25


@pytest.mark.parametrize("reason", THROTTLES)
def test_every_reason_that_nvml_may_give_has_words_and_a_remedy(reason: str) -> None:
    clocks = GpuClocks(1, 1e9, 2e9, 400.0, {reason: 1})
    assert clocks.cause != reason
    assert "nvidia-smi -q" not in remedy_of_clocks(clocks, load(None), None, 0.25).remedy


def test_without_its_plan_no_other_recipe_is_tried() -> None:
    """A custom model's file would be executed."""
    assert remedy_of_clocks(BOTH, load(None, LLAMA), None, 0.25).remedy.startswith("a higher limit")
