"""Runs on the cluster that test files share."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from shared_cluster import shared_cluster

from pentad.orchestrator.cluster import cluster as clusters


@pytest.fixture(scope="module")
def cluster() -> Iterator[clusters.Cluster]:
    """Runs of this process join the shared cluster."""
    running = shared_cluster()
    with pytest.MonkeyPatch.context() as patch:
        for command in ("train", "evaluate"):
            patch.setattr(f"pentad.orchestrator.run.{command}.launch", lambda section, ranks: nullcontext())
        patch.setattr(clusters, "join", lambda section, ranks, head: nullcontext(running))
        yield running
