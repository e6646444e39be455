"""Runs of a data mixture on Ray: what they record; a stop changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mixtures import random_corpus

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import load
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.train import prepare, train
from pentad.schedules.ir.errors import PentadError

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SMALL = [
    *("mesh.pp=2", "model.layers=2", "model.hidden=32", "model.ffn=64", "model.vocab=300", "batch.sequence_length=32"),
    *("schedule.name=1f1b", "schedule.microbatches=4", "cluster.device=cpu", "cluster.dashboard=false"),
    "cluster.start_timeout_seconds=200",
    *(
        "data.path=null",
        "data.holdout=0.0",
        "eval.every=0",
        "data.packing=documents",
        "data.document_mask=true",
        "optimizer.decay_steps=9",
    ),
    "data.curriculum=[{step: 6, weights: {chat: 2}}]",
]


def sources(folder: Path) -> str:
    return f"data.sources=[{{path: {folder}/chat}}, {{path: {folder}/text}}, {{path: {folder}/few, epochs: 1}}]"


def test_a_mixture_is_recorded_and_resumes_with_the_same_bits(cluster: clusters.Cluster, tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    random_corpus(corpora / "chat", 1, 200, 40, targets=0.5)
    random_corpus(corpora / "text", 2, 200, 60)
    random_corpus(corpora / "few", 3, 20, 20)

    def run(name: str, steps: int, *overrides: str) -> list[dict[str, Any]]:
        given = [f"run.folder={tmp_path}", f"run.name={name}", f"run.steps={steps}", f"data.cache={tmp_path}/cache"]
        config = load(None, [*given, *SMALL, *overrides])
        train(config, plan=prepare(config))
        return read_lines(tmp_path / name / "metrics.jsonl")

    once = run("once", 9, sources(corpora))
    run("twice", 4, sources(corpora))
    shutil.move(corpora, tmp_path / "moved")
    twice = run("twice", 9, sources(tmp_path / "moved"))
    for key in ("step", "loss", "grad_norm", "target_tokens", "sources"):
        assert [row[key] for row in once] == [row[key] for row in twice], key
    for row in once:
        parts = row["sources"].values()
        total = sum(part["loss"] * part["target_tokens"] for part in parts if part["target_tokens"])
        assert sum(part["target_tokens"] for part in parts) == row["target_tokens"] <= row["tokens"]
        assert total / row["target_tokens"] == pytest.approx(row["loss"], rel=1e-6)
        assert row["data_wait_seconds"] >= 0
    changes = [row for row in read_lines(tmp_path / "twice" / "journal.jsonl") if row["event"] == "mixture"]
    assert [row["used_up"] for row in changes] == ["few", None] and changes[1]["step"] == 6
    assert changes[1]["shares"] == {"chat": 2 / 3, "text": 1 / 3, "few": 0.0}
    with pytest.raises(PentadError, match=r"data.sources draw \d+ sequences of chat in 9 batches: expected \d+"):
        run("twice", 12, sources(tmp_path / "moved"), "data.curriculum=null")


@pytest.mark.timeout(600)
def test_waiting_for_data_is_less_than_a_hundredth_of_a_step(cluster: clusters.Cluster, tmp_path: Path) -> None:
    """For steps of at least 0.3 s. The first one does not count: it starts with nothing loaded."""
    for name, seed in (("chat", 1), ("text", 2), ("few", 3)):
        random_corpus(tmp_path / name, seed, 2000, 600, targets=0.5 if name == "chat" else None)
    model = ("model.hidden=256", "model.ffn=1024", "model.layers=4")
    shape = (*model, "batch.sequence_length=512", "mesh.pp=1", "batch.global_batch_size=8")
    given = [f"run.folder={tmp_path}", "run.name=long", "run.steps=6", f"data.cache={tmp_path}/cache", *SMALL, *shape]
    config = load(None, [*given, sources(tmp_path)])
    train(config, plan=prepare(config))
    rows = read_lines(tmp_path / "long" / "metrics.jsonl")[1:]
    waits, seconds = ([row[key] for row in rows] for key in ("data_wait_seconds", "step_seconds"))
    assert len(rows) == 5 and min(seconds) >= 0.3
    assert sum(waits) < 0.01 * sum(seconds)
