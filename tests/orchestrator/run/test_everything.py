"""Runs with every feature on that lose a rank and then their driver end with the bits of undisturbed runs."""

from __future__ import annotations

import csv
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_files import scalars
from mixtures import random_corpus
from multinode import Cluster, Run, multinode_cluster

from pentad.orchestrator.records.json_lines import read_lines
from pentad.workers.checkpoint.checkpoint import MANIFEST, committed
from pentad.workers.checkpoint.manifest import decode

STEPS, SECONDS = 30, 500.0  # SECONDS: the most a run may take
EVERYTHING = (
    *("model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48", "model.vocab=300"),
    *("batch.global_batch_size=8", "batch.sequence_length=32", f"run.steps={STEPS}"),
    *("data.path=null", "data.packing=documents", "data.document_mask=true", "data.holdout=0.1"),
    "data.curriculum=[{step: 13, weights: {chat: 3}}]",
    *("optimizer.name=muon", "optimizer.schedule=wsd", "optimizer.z_loss=0.001", "optimizer.clip_norm=0.5"),
    "optimizer.groups=[{pattern: embedding, learning_rate_scale: 0.5}, {pattern: '*norm', weight_decay: 0.2}]",
    *(
        "spikes.policy=skip",
        "spikes.threshold=1.0",
        "spikes.window=8",
        "spikes.min_steps=4",
        "spikes.max_consecutive=30",
    ),
    *("eval.every=3", "eval.at_start=true", "eval.sequences=10"),
    *("checkpoint.every=6", "checkpoint.keep_best=true", "loggers.use=[csv, tensorboard]"),
    *("cluster.device=cpu", "cluster.auth=disabled", "cluster.start_timeout_seconds=200", "elastic.hang_seconds=60"),
)
MIXTRAL = (
    *("model.family=mixtral", "model.experts.num_experts=4", "model.experts.top_k=2"),
    "model.experts.intermediate_size=16",
)
EXPERTS = (*MIXTRAL, "model.experts.bias_update_rate=0.01")
LORA = ("lora.rank=2", "optimizer.groups=[{pattern: '*lora_B', learning_rate_scale: 2.0}]")
LONGER = ("data.balance=dynamic", "data.capacity_factor=1.0", "data.microbatch_factor=2")
MESHES = {
    "zb-h2": ("mesh.dp=2", "mesh.pp=2", "schedule.name=zb-h2", "schedule.microbatches=4"),
    "dualpipev": ("mesh.pp=2", "mesh.tp=2", "schedule.name=dualpipev", "schedule.microbatches=4"),
    "zero": ("mesh.dp=2", "mesh.pp=1", "mesh.cp=2", "zero.stage=3", "schedule.name=1f1b", "schedule.microbatches=4"),
    "longer steps": ("mesh.dp=2", "mesh.pp=2", "schedule.name=zb-h2", "schedule.microbatches=4", *LONGER),
    "experts": ("mesh.ep=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=4", *EXPERTS),
    "adapters": ("mesh.pp=2", "mesh.tp=2", "schedule.name=zb-h2", "schedule.microbatches=4"),
    "adapters beside experts": ("mesh.ep=2", "mesh.pp=2", "schedule.name=zb-h2", "schedule.microbatches=4", *MIXTRAL),
}
# The values of a row that depend only on what was trained, not on when or by which generation.
EXACT = ("step", "loss", "z_loss", "grad_norm", "lr", "tokens", "total_tokens", "target_tokens", "skipped", "sources")
EVAL_EXACT = ("step", "data", "loss", "perplexity", "tokens", "sequences")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with multinode_cluster() as cluster:
        cluster.resize(4, 1)
        yield cluster


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chat data in which half of the tokens count, text, and a source that is used up during the run."""
    folder = tmp_path_factory.mktemp("corpora")
    chat = random_corpus(folder / "chat", 1, 200, 40, targets=0.5)
    text, few = random_corpus(folder / "text", 2, 200, 60), random_corpus(folder / "few", 3, 60, 20)
    sources = f"[{{path: {chat}, weight: 1}}, {{path: {text}, weight: 2}}, {{path: {few}, weight: 1, epochs: 1}}]"
    return f"data.sources={sources}"


@pytest.mark.parametrize("case", MESHES)
def test_a_run_that_loses_a_rank_and_its_driver_has_the_same_bits(
    nodes: Cluster, corpora: str, tmp_path: Path, case: str
) -> None:
    given = (*EVERYTHING, corpora, f"data.cache={tmp_path}", *MESHES[case])
    if "adapters" in case:
        base = Run(nodes, tmp_path / "base", *given, "run.steps=2", "loggers.use=[]")
        assert base.end(SECONDS) == 0, base.describe()
        given = (*given, *LORA, f"run.init_from={base.folder}")
    expected = Run(nodes, tmp_path / "expected", *given)
    assert expected.end(SECONDS) == 0, expected.describe()

    run = Run(nodes, tmp_path / "killed", *given)
    try:
        run.wait_for(lambda: len(run.rows()) > 5, SECONDS)
        run.signal_ranks(1)
        run.wait_for(lambda: run.events("recovered"), SECONDS)
        run.wait_for(lambda: len(run.rows()) > 14, SECONDS)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        again = Run(nodes, tmp_path / "killed", *given)
        assert again.end(SECONDS) == 0, again.describe()
        assert_same_run(again, expected)
        again.assert_gone()
    finally:
        run.stop()


def assert_same_run(run: Run, expected: Run) -> None:
    found, wanted = exact(run.rows(), EXACT), exact(expected.rows(), EXACT)
    assert [row["step"] for row in found] == list(range(STEPS))
    assert found == wanted, run.describe()
    assert any(row["skipped"] for row in found) and not all(row["skipped"] for row in found)
    assert {row["sources"]["few"]["target_tokens"] for row in found[-5:]} == {0}  # used up
    evaluations = exact(evaluations_of(run), EVAL_EXACT)
    assert evaluations == exact(evaluations_of(expected), EVAL_EXACT)
    assert [row["step"] for row in evaluations[::3]] == [*range(0, STEPS, 3), STEPS]
    assert manifest(run) == manifest(expected)
    assert run.events("best")[-1]["step"] == expected.events("best")[-1]["step"]
    assert set(committed(run.folder / "checkpoints")) == set(committed(expected.folder / "checkpoints"))
    assert table(run) == table(expected)
    assert curves(run) == curves(expected)


def evaluations_of(run: Run) -> list[dict[str, Any]]:
    return read_lines(run.folder / "eval.jsonl")


def exact(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in keys} for row in rows]


def manifest(run: Run) -> tuple[Any, ...]:
    """(step, shards, metadata) of the last checkpoint, without the generation, which files are named by, too; shards
    include sha256 of files."""
    found = decode((run.folder / "checkpoints" / f"step-{STEPS:08d}" / MANIFEST).read_bytes())
    shards = [replace(shard, file=re.sub(r"\.gen\d+\.", ".", shard.file)) for shard in found.shards]
    return found.step, shards, {**found.meta, "generation": 0}


def is_exact(name: str) -> bool:
    part, _, key = name.partition("/")
    return part == "eval" or key.partition("/")[0] in EXACT


def table(run: Run) -> list[dict[str, str]]:
    """The rows of metrics.csv; at each step number, that of the step before those of evaluations."""
    with (run.folder / "metrics.csv").open(newline="") as file:
        rows = [{key: row[key] for key in row if key == "step" or is_exact(key)} for row in csv.DictReader(file)]
    return sorted(rows, key=lambda row: (int(row["step"]), row["train/loss"] == "", sorted(row.items())))


def curves(run: Run) -> list[tuple[str, int, float]]:
    """What TensorBoard shows."""
    shown = scalars(run.folder / "tensorboard")
    return sorted((each.tag, each.step, each.value) for each in shown if is_exact(each.tag))
