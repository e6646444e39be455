"""Runs on the cluster that test files share, or on ranks in this process."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_cluster import shared_cluster
from sharing import SHARED_CLUSTER, file_of

from pentad.orchestrator.cluster import cluster as clusters


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[clusters.Cluster]:
    """Runs of this process join the shared cluster."""
    assert file_of(request.node.nodeid) in SHARED_CLUSTER, "else another process may start a second cluster"
    running = shared_cluster()
    with pytest.MonkeyPatch.context() as patch:
        for command in ("train", "evaluate"):
            patch.setattr(f"pentad.orchestrator.run.{command}.launch", lambda section, ranks: nullcontext())
        patch.setattr(clusters, "join", lambda section, ranks, head: nullcontext(running))
        yield running


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Starts runs of four ranks that live in this process (`fake_ray`), of 40 steps unless told otherwise."""
    from fake_ray import FakeRay, FakeRun

    from pentad.orchestrator.cluster.group import WorkerGroup
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.monitoring.runfolder import RunFolder
    from pentad.orchestrator.planning.planning import make_plan

    fake = FakeRay(monkeypatch, "node0", "node0", "node1", "node1")
    small = "model.layers=4", "batch.global_batch_size=8", "schedule.name=1f1b", "cluster.start_timeout_seconds=100"
    with ExitStack() as stack:

        def do(*overrides: str, device: str = "cpu", nodes: tuple[str, ...] = fake.nodes) -> FakeRun:
            fake.nodes = nodes
            config = load(None, [f"run.folder={tmp_path}", "run.steps=40", *small, *overrides])
            plan = replace(make_plan(config, "cpu"), device=device)
            folder = stack.enter_context(RunFolder(config, plan))
            return FakeRun(fake, config, folder, WorkerGroup.start(plan, None, 100.0, runner=""))

        yield do
