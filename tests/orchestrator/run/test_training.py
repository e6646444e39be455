"""Whole runs of `pentad train` on real Ray, real ranks and real text."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pentad.workers.checkpoint.checkpoint import newest, read

COMMAND = [sys.executable, "-P", "-c", "import sys; from pentad.orchestrator.cli.cli import main; sys.exit(main())"]
STEPS = 150  # many, so that a signal after the 20th comes before the last
SMALL = [
    "mesh.pp=2",
    "model.layers=4",
    "model.hidden=32",
    "model.ffn=64",
    "model.vocab=300",
    "batch.sequence_length=32",
    "schedule.microbatches=4",
    f"run.steps={STEPS}",
    "cluster.device=cpu",
    "cluster.dashboard=false",
]

pytestmark = pytest.mark.timeout(300)


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "train", f"run.folder={folder}", *overrides]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return output


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state(run: Path) -> dict[str, torch.Tensor]:
    found = newest(run / "checkpoints").checkpoint
    assert found is not None
    assert found.step == STEPS
    return read(found, found.files)


def test_a_run_that_was_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path):
    whole = start(tmp_path, *SMALL, "run.name=whole")
    finish(whole)
    halted = start(tmp_path, *SMALL, "run.name=halted")
    while len(rows(tmp_path / "halted")) < 20:
        assert halted.poll() is None, halted.communicate()
        time.sleep(0.02)
    halted.send_signal(signal.SIGTERM)
    assert "stopped after step" in finish(halted)
    stopped = len(rows(tmp_path / "halted"))
    assert 20 <= stopped < STEPS
    shutil.copytree(tmp_path / "halted", tmp_path / "moved")
    assert f"resuming from step {stopped}" in finish(start(tmp_path, *SMALL, "run.name=halted"))
    a, b = rows(tmp_path / "whole"), rows(tmp_path / "halted")
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in a] == [row[key] for row in b], key
    one, other = state(tmp_path / "whole"), state(tmp_path / "halted")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # on another mesh it is the same run but for rounding
    mesh = ["mesh.pp=1", "mesh.dp=2", "schedule.name=gpipe", "run.name=moved"]
    assert f"resuming from step {stopped}" in finish(start(tmp_path, *SMALL, *mesh))
    c = rows(tmp_path / "moved")
    assert [row["step"] for row in c] == list(range(STEPS))
    for mine, same in zip(c[stopped : stopped + 20], a[stopped : stopped + 20], strict=True):
        assert mine["loss"] == pytest.approx(same["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-3)


def test_the_loss_falls_on_real_text(tmp_path):
    output = finish(start(tmp_path, *SMALL, "run.name=falls", "schedule.name=dualpipe", "--json"))
    summary = json.loads(output)
    assert summary["state"] == "finished"
    assert summary["first_loss"] == pytest.approx(5.70, abs=0.05)  # ln(300): the first guess is no guess
    assert summary["loss"] < 4.9
