"""Runs with a loss spike, on real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spiky_runner import SKIPPED, SPIKE_BATCH

from pentad.orchestrator.config.config import load
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.train import train
from pentad.workers.checkpoint import shards
from pentad.workers.checkpoint.checkpoint import newest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
SMALL = [
    *("mesh.pp=2", "model.layers=4", "model.hidden=32", "model.heads=4", "model.ffn=48", "cluster.device=cpu"),
    *("schedule.microbatches=4", "batch.global_batch_size=8", "batch.sequence_length=32", "run.steps=16"),
    *("cluster.start_timeout_seconds=200", "optimizer.decay_steps=16", "optimizer.warmup_steps=2"),
]
ROLLBACK = [
    *("spikes.policy=rollback", "spikes.threshold=50", "spikes.window=4", "spikes.min_steps=3"),
    "checkpoint.every=4",
]


def run(folder: Path, name: str, runner: str, *overrides: str) -> dict[str, torch.Tensor]:
    """The state after a run, or after the last call for a run of several."""
    config = load(None, [f"run.folder={folder}", f"run.name={name}", *SMALL, *overrides])
    train(config, runner=runner)
    found = newest(folder / name / "checkpoints").checkpoint
    assert found is not None
    return shards.read(found, [tensor for tensor in found.tensors if not tensor.startswith("spikes.")])


ADAPTERS = ["lora.rank=2", "lora.targets=all-linear", "run.init_from=base"]


@pytest.mark.parametrize(
    "overrides",
    [["schedule.post_validation=false"], ["schedule.post_validation=true"], ADAPTERS],
    ids=["barrier", "post_validation", "lora"],
)
def test_a_rollback_has_the_bits_of_a_run_that_never_saw_the_batches(tmp_path: Path, overrides: list[str]) -> None:
    if overrides is ADAPTERS:
        run(tmp_path, "base", "pentad.workers.runtime.runner:Runner", "run.steps=2")
    found = run(tmp_path, "spiky", "spiky_runner:SpikyRunner", *ROLLBACK, *overrides)
    expected = run(tmp_path, "reference", "spiky_runner:SkippingRunner", *overrides)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    (rollback,) = [row for row in read_lines(tmp_path / "spiky" / "journal.jsonl") if row["event"] == "rollback"]
    assert (rollback["step"], rollback["to"]) == (SPIKE_BATCH, 8)
    assert rollback["skipped_batches"] == [list(each) for each in SKIPPED]
    rows = {name: read_lines(tmp_path / name / "metrics.jsonl") for name in ("spiky", "reference")}
    assert [row["loss"] for row in rows["spiky"]] == [row["loss"] for row in rows["reference"]]
    checkpoint = newest(tmp_path / "spiky" / "checkpoints").checkpoint
    assert checkpoint is not None and checkpoint.meta["skipped_batches"] == [list(each) for each in SKIPPED]


def test_a_run_that_is_resumed_after_a_rollback_has_the_same_bits(tmp_path: Path) -> None:
    expected = run(tmp_path, "whole", "spiky_runner:SpikyRunner", *ROLLBACK)
    run(tmp_path, "parts", "spiky_runner:SpikyRunner", *ROLLBACK, "run.steps=11")
    found = run(tmp_path, "parts", "spiky_runner:SpikyRunner", *ROLLBACK)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
