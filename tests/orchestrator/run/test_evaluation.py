"""Complete runs that evaluate, on real Ray and real ranks, and `pentad eval` of what they saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.runfolder import find_checkpoint
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.evaluate import eval_config, evaluate
from pentad.orchestrator.run.train import prepare, train
from pentad.workers.checkpoint.checkpoint import open_checkpoint
from pentad.workers.checkpoint.shards import read

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SMALL = [
    *("mesh.pp=2", "model.layers=4", "model.hidden=32", "model.ffn=64", "model.vocab=300", "batch.sequence_length=32"),
    *("schedule.name=dualpipe", "schedule.microbatches=4", "cluster.device=cpu", "cluster.dashboard=false"),
    "cluster.start_timeout_seconds=200",
    *("data.holdout=0.1", "eval.sequences=20"),
]
EVALUATES = ["eval.every=2", "eval.at_start=true", "checkpoint.every=2", "checkpoint.keep_best=holdout"]
SILENT = ["data.path=builtin:pydoc", "eval.every=0", "checkpoint.every=2"]


def run(folder: Path, name: str, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, rows of eval.jsonl)."""
    config = load(None, [f"run.folder={folder}", f"run.name={name}", *SMALL, *overrides])
    summary = train(config, plan=prepare(config))
    return summary, read_lines(folder / name / "eval.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = open_checkpoint(folder)
    return read(found, found.tensors)


def test_a_run_that_evaluates_is_the_same_run(cluster: clusters.Cluster, tmp_path: Path) -> None:
    summary, rows = run(tmp_path, "evaluated", "run.steps=6", *EVALUATES)
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert rows[-1]["loss"] < rows[0]["loss"] and {row["tokens"] for row in rows} == {20 * 32}
    assert summary["evaluations"] == rows[-1:] and summary["best"]["step"] == 6
    _, none = run(tmp_path, "plain", "run.steps=6", *SILENT)
    assert [row["step"] for row in none] == [6]
    run(tmp_path, "resumed", "run.steps=4", "optimizer.decay_steps=6", "optimizer.warmup_steps=0", *EVALUATES)
    _, resumed = run(
        tmp_path, "resumed", "run.steps=6", "optimizer.decay_steps=6", "optimizer.warmup_steps=0", *EVALUATES
    )
    assert [row["loss"] for row in resumed] == [row["loss"] for row in rows]
    metrics = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("evaluated", "plain", "resumed")]
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [row[key] for row in metrics[0]] == [row[key] for row in metrics[1]] == [row[key] for row in metrics[2]]
    one, *others = (
        weights(tmp_path / name / "checkpoints" / "step-00000006") for name in ("evaluated", "plain", "resumed")
    )
    for other in others:
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    check_eval(tmp_path, rows[-1])


def check_eval(folder: Path, row: dict[str, Any]) -> None:
    """`pentad eval` of the newest checkpoint gives the loss of the run; on the same mesh, to the bit."""
    checkpoint = find_checkpoint(str(folder / "evaluated"), "CHECKPOINT")
    before = sorted((folder / "evaluated").rglob("*"))
    display = Display(Console(quiet=True), "eval", 1)
    (found,) = evaluate(eval_config(checkpoint, (), None, []), checkpoint, display)
    assert {key: found[key] for key in ("step", "data", "loss", "tokens", "sequences")} == {
        key: row[key] for key in ("step", "data", "loss", "tokens", "sequences")
    }
    other = eval_config(checkpoint, ["py=builtin:pydoc"], 20, ["mesh.pp=1", "mesh.dp=2", "schedule.name=gpipe"])
    (found,) = evaluate(other, checkpoint, display)
    assert (found["data"], found["sequences"]) == ("py", 20) and found["loss"] != row["loss"]
    same = eval_config(checkpoint, (), None, ["mesh.pp=1", "mesh.dp=2", "schedule.name=gpipe"])
    (found,) = evaluate(same, checkpoint, display)
    assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert sorted((folder / "evaluated").rglob("*")) == before
