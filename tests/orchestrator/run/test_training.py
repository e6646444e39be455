"""Complete runs on real Ray, real ranks and real text."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from worker_processes import WorkerProcess, without_a_driver

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run.train import train as run_training
from pentad.workers.checkpoint.checkpoint import newest
from pentad.workers.checkpoint.shards import read

# Calls have at most 20 steps (checkpoint.every), so a signal after STOP_AFTER steps arrives before the last are
# submitted.
STEPS = 60
STOP_AFTER = 5
SMALL = [
    "mesh.pp=2",
    "model.layers=4",
    "model.hidden=32",
    "model.ffn=64",
    "model.vocab=300",
    "batch.sequence_length=32",
    "schedule.name=dualpipe",
    "schedule.microbatches=4",
    f"run.steps={STEPS}",
    "checkpoint.every=20",
    "optimizer.learning_rate=3e-3",
    "cluster.device=cpu",
    "cluster.dashboard=false",
    "cluster.start_timeout_seconds=200",
]
Train = Callable[..., tuple[dict[str, Any], str]]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def train(cluster: clusters.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    def do(name: str, *overrides: str) -> tuple[dict[str, Any], str]:
        config = load(None, [f"run.folder={tmp_path}", f"run.name={name}", *SMALL, *overrides])
        summary = run_training(config, display=Display(Console(width=200), config.run.name, config.run.steps))
        return summary, capsys.readouterr().out

    return do


def terminate_after(steps: int, run: Path) -> None:
    """Sends SIGTERM to this process once a run has done `steps` steps."""

    def watch() -> None:
        while len(read_lines(run / "metrics.jsonl")) < steps:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def state(run: Path) -> dict[str, torch.Tensor]:
    found = newest(run / "checkpoints").checkpoint
    assert found is not None
    assert found.step == STEPS
    return read(found, found.tensors)


def stop_and_resume(train: Train, folder: Path, *more: str) -> tuple[dict[str, Any], int]:
    """(summary of a run that was stopped and then resumed with `more`, the number of steps before the stop)."""
    terminate_after(STOP_AFTER, folder / "halted")
    summary, printed = train("halted")
    stopped = summary["steps"]
    assert summary["state"] == "stopped" and f"stopped after step {stopped}" in printed
    assert STOP_AFTER <= stopped < STEPS
    summary, printed = train("halted", *more)
    assert f"resuming from step {stopped}" in printed
    assert [row["step"] for row in read_lines(folder / "halted" / "metrics.jsonl")] == list(range(STEPS))
    return summary, stopped


@pytest.mark.slow
def test_the_loss_falls_and_a_resumed_run_equals_an_uninterrupted_one(
    train: Train, workers: list[WorkerProcess], tmp_path: Path
) -> None:
    """The uninterrupted one runs without Ray."""
    plan = make_plan(load(None, SMALL), "cpu")
    expected, state_expected = without_a_driver(workers, plan, STEPS)
    finished, _ = stop_and_resume(train, tmp_path)
    assert finished["state"] == "finished"
    assert finished["first_loss"] == pytest.approx(5.70, abs=0.05)  # ln(300): the model is untrained
    assert finished["loss"] < 4.9
    rows = read_lines(tmp_path / "halted" / "metrics.jsonl")
    assert [(row["loss"], row["grad_norm"]) for row in rows] == expected
    assert [row["lr"] for row in rows] == [plan.optimizer.learning_rate.at(step) for step in range(STEPS)]
    tokens = 16 * 32  # of the quickstart's batch
    assert [(row["tokens"], row["total_tokens"]) for row in rows] == [(tokens, tokens * n) for n in range(1, STEPS + 1)]
    found = state(tmp_path / "halted")
    assert found.keys() == state_expected.keys()
    assert all(torch.equal(found[name], state_expected[name]) for name in found)


@pytest.mark.slow
def test_a_run_resumed_on_another_mesh_equals_an_uninterrupted_one_up_to_rounding(train: Train, tmp_path: Path) -> None:
    train("whole")
    _, stopped = stop_and_resume(train, tmp_path, "mesh.pp=1", "schedule.name=gpipe")
    a, b = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "halted"))
    for key in ("step", "lr", "tokens"):
        assert [row[key] for row in a] == [row[key] for row in b], key
    for resumed, same in zip(b[stopped : stopped + 20], a[stopped : stopped + 20], strict=True):
        assert resumed["loss"] == pytest.approx(same["loss"], rel=1e-4)
        assert resumed["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_with_another_optimizer_and_more_steps(train: Train, tmp_path: Path) -> None:
    """Learning rates stay those of the first start; the old optimizer's state is dropped, and the user is told."""
    small = "optimizer.schedule=wsd", "mesh.tp=2", "zero.stage=1"
    train("first", *small, "run.steps=10")
    summary, printed = train("first", *small, "run.steps=20", "optimizer.name=muon")
    assert summary["steps"] == 20
    assert "keeps its schedule of optimizer.decay_steps = 10" in printed
    assert "the old state (optimizer.m and optimizer.v) is dropped" in printed
    rows = read_lines(tmp_path / "first" / "metrics.jsonl")
    assert [row["lr"] for row in rows[10:]] == pytest.approx([3e-4] * 10)
    assert rows[-1]["loss"] < rows[9]["loss"] < rows[0]["loss"]
    train("again", *small, "run.steps=10")
    train("again", *small, "run.steps=20", "optimizer.name=muon")
    again = read_lines(tmp_path / "again" / "metrics.jsonl")
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]


@pytest.mark.slow
def test_a_run_with_too_few_slots_for_tokens_says_so_and_has_the_same_losses(train: Train, tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "top_k": 2, "intermediate_size": 32}
    experts = [f"model.experts.{key}={value}" for key, value in sizes.items()]
    given = "model.family=qwen3-moe", *experts, "mesh.pp=1", "mesh.ep=2", "schedule.name=1f1b", "run.steps=6"
    (_, printed), _ = train("slots", *given, "mesh.ep_capacity=0.2"), train("exact", *given)
    rows, expected = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("slots", "exact"))
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(row["loss"], row["grad_norm"]) for row in expected]
    grown = [event for event in read_lines(tmp_path / "slots" / "journal.jsonl") if event["event"] == "expert slots"]
    assert [event["before"] for event in grown[1:]] == [event["slots"] for event in grown[:-1]]
    assert grown[0]["before"] < grown[0]["slots"]
    assert f"{grown[0]['before']} slots for tokens to another rank's experts were too few" in printed
