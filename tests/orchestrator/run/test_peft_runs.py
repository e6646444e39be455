"""Runs that continue an adapter of PEFT, on real Ray."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft_files import ATTENTION, write_adapter

from pentad.orchestrator.config.config import load
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.train import train
from pentad.schedules.spec.lora import LoraSpec
from pentad.workers.checkpoint import shards
from pentad.workers.checkpoint.checkpoint import newest, open_checkpoint
from pentad.workers.hf.exporter import ExportRequest
from pentad.workers.hf.peft import read_adapter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
SMALL = [
    *("mesh.pp=2", "mesh.dp=2", "model.layers=4", "model.hidden=32", "model.heads=4", "model.ffn=48"),
    *("cluster.device=cpu", "schedule.microbatches=4", "batch.global_batch_size=8", "batch.sequence_length=32"),
    *("cluster.start_timeout_seconds=200", "optimizer.decay_steps=6", "optimizer.warmup_steps=2"),
]


def run(folder: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """The state after a run."""
    train(load(None, [f"run.folder={folder}", f"run.name={name}", *SMALL, *overrides]))
    found = newest(folder / name / "checkpoints").checkpoint
    assert found is not None
    return shards.read(found, found.tensors)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_starts_from_an_adapter_of_peft_and_needs_it_no_longer(tmp_path: Path, zero: int) -> None:
    run(tmp_path, "base", "run.steps=1")
    adapter, model = tmp_path / "adapter", load(None, SMALL).model.spec
    expected = read_adapter(
        write_adapter(adapter, model), ExportRequest("llama", model, 0), LoraSpec(2, 4.0, ATTENTION)
    )
    keys = ("lora.rank=2", "lora.alpha=4", "run.init_from=base", f"lora.init_from={adapter}", f"zero.stage={zero}")
    whole = run(tmp_path, "whole", *keys, "run.steps=6")
    (start,) = [row for row in read_lines(tmp_path / "whole" / "journal.jsonl") if row["event"] == "start"]
    first = tmp_path / "whole" / "checkpoints" / "step-00000000"
    assert (start["step"], start["checkpoint"]) == (0, str(first))
    taken = open_checkpoint(first)
    found = shards.read(taken, taken.tensors)
    assert found.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())

    run(tmp_path, "parts", *keys, "run.steps=2")
    shutil.rmtree(adapter)
    parts = run(tmp_path, "parts", *keys, "run.steps=6")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
