"""Meshes, references and assertions for the elastic restart tests, on CPUs and GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from multinode import Cluster, Run

from pentad.orchestrator.records.checkpoint_places import checkpoints_in
from pentad.orchestrator.records.verify import verify
from pentad.workers.checkpoint.checkpoint import newest
from pentad.workers.checkpoint.shards import read

STEPS = 60
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # only dualpipe's mirrored stages do
SCHEDULES = {"1f1b": SQUARE, "zb-h2": SQUARE, "dualpipe": LINE}
PAIR = ("mesh.pp=2", "schedule.microbatches=4")
CUT = (*SQUARE, "zero.stage=3")  # replicas hold different shards, so no state is redundant
GROUPS = ("mesh.dp=4", "mesh.pp=1", "schedule.microbatches=2", "zero.stage=3", "zero.shards=2")  # and these do again
TENSOR = ("mesh.dp=2", "mesh.pp=1", "mesh.tp=2", "schedule.microbatches=4")
EXPERTS = (
    *("mesh.dp=2", "mesh.pp=1", "mesh.ep=2", "schedule.microbatches=2", "model.family=mixtral"),
    *(
        f"model.experts.{word}"
        for word in ("num_experts=4", "top_k=2", "intermediate_size=32", "bias_update_rate=0.01")
    ),
)
TENSOR_PIPE = ("mesh.pp=2", "mesh.tp=2", "schedule.microbatches=4")  # no replicas
EXPERT_PIPE = ("mesh.pp=2", "mesh.ep=2", "schedule.microbatches=2", *EXPERTS[4:])
CONTEXT = ("mesh.pp=1", "mesh.cp=4", "schedule.microbatches=4")
SMALL = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=64",
    "model.vocab=300",
    "batch.global_batch_size=8",
    "batch.sequence_length=32",
    f"run.steps={STEPS}",
    "elastic.hang_seconds=3",
    "elastic.spares=0",  # unless a test is about them, spares would only take time from the ranks
    "cluster.start_timeout_seconds=150",
    "cluster.device=cpu",
    "cluster.auth=disabled",
)
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
Reference = Callable[..., Outcome]


@contextmanager
def started(nodes: Cluster, folder: Path, small: Sequence[str] = SMALL) -> Iterator[Start]:
    """Starts small runs, and ends those that are still alive; a run that is given the `name` of another resumes it."""
    runs: list[Run] = []

    def do(*overrides: str, name: str = "", **options: Any) -> Run:
        runs.append(Run(nodes, folder / (name or str(len(runs))), *small, *overrides, **options))
        return runs[-1]

    try:
        yield do
    finally:
        for run in runs:
            run.stop()
        if nodes.ranks():
            nodes.clear()


def references(
    nodes: Cluster,
    folders: pytest.TempPathFactory,
    small: Sequence[str] = SMALL,
    steps: int = STEPS,
    sizes: Sequence[int] = (2, 2, 2),
) -> Reference:
    """The outcome of a run without faults, computed once for the same overrides."""
    found: dict[tuple[str, ...], Outcome] = {}

    def do(*overrides: str) -> Outcome:
        if overrides not in found:
            nodes.resize(*sizes)
            run = Run(nodes, folders.mktemp("reference"), *small, *overrides)
            assert run.end() == 0, run.describe()
            found[overrides] = outcome(run, steps)
        return found[overrides]

    return do


def outcome(run: Run, steps: int = STEPS) -> Outcome:
    """Loss and gradient norm of each step, and the state in the last checkpoint; asserts that each step ran once, on
    its samples."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps)), run.describe()
    assert verify(run.folder, rows, run.events(), data=True).steps == steps
    found = newest(checkpoints_in(run.folder)).checkpoint
    assert found is not None and found.step == steps
    return [(row["loss"], row["grad_norm"]) for row in rows], read(found, found.tensors)


def assert_same(run: Run, expected: Outcome, steps: int = STEPS) -> None:
    actual = outcome(run, steps)
    assert actual[0] == expected[0], run.describe()
    assert actual[1].keys() == expected[1].keys()
    assert all(torch.equal(actual[1][key], value) for key, value in expected[1].items()), run.describe()


def assert_ends_as_expected(run: Run, overrides: Sequence[str], expected: Outcome, steps: int = STEPS) -> Run:
    """Restarts a run whose driver is dead, and asserts its outcome."""
    again = Run(run.cluster, run.folder.parent, *SMALL, *overrides)
    try:
        assert again.end() == 0, again.describe()
        assert_same(again, expected, steps)
        again.assert_gone()
    finally:
        again.stop()
    return again


def assert_recovered(run: Run, *how: str) -> None:
    """Asserts that the journal has loss, fence and recovery in this order, and one recovery for each of `how`."""
    assert run.end() == 0, run.describe()
    recovered = run.events("recovered")
    assert tuple(row["how"] for row in recovered) == how, run.describe()
    kinds = [row["event"] for row in run.events("lost", "fence", "recovered")]
    if "grow" not in how:
        assert kinds[0] == "lost" and kinds[-2:] == ["fence", "recovered"], run.describe()
    verify(run.folder, run.rows(), run.events(), data=False)
    run.assert_gone()
