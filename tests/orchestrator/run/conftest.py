"""Runs on the cluster that test files share, or on clusters of their own whose nodes they may lose."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from elastic_cases import Reference, Start, references, started
from multinode import Cluster, multinode_cluster
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


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with multinode_cluster() as cluster:
        yield cluster


@pytest.fixture
def start_run(nodes: Cluster, tmp_path: Path) -> Iterator[Start]:
    with started(nodes, tmp_path) as do:
        yield do


@pytest.fixture(scope="module")
def reference(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return references(nodes, tmp_path_factory)
