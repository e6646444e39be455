"""Runs on the cluster that test files share."""

from collections.abc import Iterator
from contextlib import nullcontext

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
