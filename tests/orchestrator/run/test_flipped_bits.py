"""Runs in which a bit flips, on real Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pentad.orchestrator.config.config import load
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.records.verify import verify
from pentad.orchestrator.run.train import train
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import shards
from pentad.workers.checkpoint.checkpoint import newest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
SMALL = [
    *("mesh.dp=2", "mesh.pp=1", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn=48"),
    *("schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=8", "batch.sequence_length=32"),
    *("cluster.device=cpu", "cluster.start_timeout_seconds=200", "optimizer.warmup_steps=2", "run.steps=18"),
]
CHECKS = ["elastic.check_every=4", "checkpoint.every=8"]
RUNNER = "pentad.workers.runtime.runner:Runner"


def run(folder: Path, name: str, runner: str, *overrides: str) -> dict[str, torch.Tensor]:
    """The state after a run."""
    train(load(None, [f"run.folder={folder}", f"run.name={name}", *SMALL, *overrides]), runner=runner)
    found = newest(folder / name / "checkpoints").checkpoint
    assert found is not None and found.step == 18
    return shards.read(found, list(found.tensors))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / name / "journal.jsonl") if row["event"] == "flipped bits"]


def test_a_run_that_evicts_the_ranks_that_are_wrong_has_the_bits_of_a_run_without_a_fault(tmp_path: Path) -> None:
    expected = run(tmp_path, "reference", RUNNER)
    found = {
        kind: run(tmp_path, kind, f"flipping_runner:{kind}", *CHECKS, "elastic.check_policy=evict")
        for kind in ("FlippedWeights", "WrongOnce")
    }
    for kind, verdict, ranks in [("FlippedWeights", "data", [0, 1]), ("WrongOnce", "hardware", [1])]:
        assert all(torch.equal(found[kind][name], value) for name, value in expected.items()), kind
        (event,) = events(tmp_path, kind)
        assert (event["step"], event["verdict"], event["ranks"]) == (12, verdict, ranks)
        rows, journal = (read_lines(tmp_path / kind / name) for name in ("metrics.jsonl", "journal.jsonl"))
        assert verify(tmp_path / kind, rows, journal, data=True).steps == 18
        (recovered,) = [row for row in journal if row["event"] == "recovered"]
        assert (recovered["how"], recovered["step"]) == ("checkpoint", 8)


def test_a_run_that_stops_resumes_from_a_checkpoint_of_before(tmp_path: Path) -> None:
    expected = run(tmp_path, "reference", RUNNER)
    with pytest.raises(PentadError, match=r"after step 12, the states of ranks 0 and 1 differ in .* \(rank 0"):
        run(tmp_path, "stopped", "flipping_runner:FlippedWeights", *CHECKS)
    saved = newest(tmp_path / "stopped" / "checkpoints").checkpoint
    assert saved is not None and saved.step == 8
    found = run(tmp_path, "stopped", RUNNER, *CHECKS)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(events(tmp_path, "stopped")) == 1
