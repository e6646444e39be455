"""The fixtures `pentad`, which runs a command line, `start`, which runs on ranks in this process, and `one_rank`."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import pentad

__all__ = ["pentad"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives inside layers work with one rank alone."""
    from fake_groups import fake_collectives  # imports torch

    fake_collectives(monkeypatch)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Starts runs of four ranks that live in this process (`fake_ray`), of 40 steps unless told otherwise."""
    from fake_ray import FakePlacement, FakeRay, FakeRun

    from pentad.orchestrator.cluster.group import WorkerGroup
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.monitoring.runfolder import RunFolder
    from pentad.orchestrator.planning.planning import make_plan

    fake = FakeRay(monkeypatch, "node0", "node0", "node1", "node1")
    small = "model.layers=4", "batch.global_batch_size=8", "schedule.name=1f1b", "cluster.start_timeout_seconds=100"
    with ExitStack() as stack:

        def do(*overrides: str, device: str = "cpu", nodes: tuple[str, ...] = fake.nodes) -> FakeRun:
            fake.nodes = fake.first = nodes
            config = load(None, [f"run.folder={tmp_path}", "run.steps=40", *small, *overrides])
            plan = replace(make_plan(config, "cpu"), device=device)
            folder = stack.enter_context(RunFolder(config, plan))
            return FakeRun(fake, config, folder, WorkerGroup.start(plan, FakePlacement(fake), 100.0, runner=""))

        yield do
