"""Meshes, references and assertions for the elastic restart tests, on CPUs and GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from multinode import Run

from pentad.orchestrator.records.verify import verify
from pentad.workers.checkpoint.checkpoint import newest
from pentad.workers.checkpoint.shards import read

STEPS = 60
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # only dualpipe's mirrored stages do
SCHEDULES = {"1f1b": SQUARE, "zb-h2": SQUARE, "dualpipe": LINE}
# A driver whose ranks run without torch.
FAKED = """
import sys
from rich.console import Console
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
try:
    train(load(None, sys.argv[1:]), display=Display(Console(), "trial", 0), runner="fake_runner:FakeRunner")
except PentadError as error:
    sys.exit(f"pentad: {error}")
"""
FAKE = (sys.executable, "-c", FAKED)
Start = Callable[..., Run]
Outcome = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def outcome(run: Run, steps: int = STEPS) -> Outcome:
    """Loss and gradient norm of each step, and the state in the last checkpoint; asserts that each step ran once, on
    its samples."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps)), run.describe()
    assert verify(run.folder, rows, data=True).steps == steps
    found = newest(run.folder / "checkpoints").checkpoint
    assert found is not None and found.step == steps
    return [(row["loss"], row["grad_norm"]) for row in rows], read(found, found.tensors)


def assert_same(run: Run, expected: Outcome, steps: int = STEPS) -> None:
    actual = outcome(run, steps)
    assert actual[0] == expected[0], run.describe()
    assert actual[1].keys() == expected[1].keys()
    assert all(torch.equal(actual[1][key], value) for key, value in expected[1].items()), run.describe()


def assert_recovered(run: Run, *how: str) -> None:
    """Asserts that the journal has loss, fence and recovery in this order, and one recovery for each of `how`."""
    assert run.end() == 0, run.describe()
    recovered = run.events("recovered")
    assert tuple(row["how"] for row in recovered) == how, run.describe()
    kinds = [row["event"] for row in run.events("lost", "fence", "recovered")]
    if "grow" not in how:
        assert kinds[0] == "lost" and kinds[-2:] == ["fence", "recovered"], run.describe()
    verify(run.folder, run.rows(), data=False)
    run.assert_gone()
