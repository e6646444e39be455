"""The Ray cluster that test files share: it starts when a test first asks for it and stops before a file that does not.

It has four CPUs, four GPUs that only Ray believes in, a dashboard and a token; its processes find this Python and the
helpers.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from paths import SUPPORT
from started_cluster import start_cluster

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster import local_head
from pentad.orchestrator.config.sections import ClusterSection

RANKS = 4
GPUS = "7,5,6,4"

_open = ExitStack()
_running: list[clusters.Cluster] = []


def shared_cluster() -> clusters.Cluster:
    if not _running:
        _running.append(_start())
    return _running[0]


def stop_shared_cluster() -> None:
    _running.clear()
    _open.close()


def _start() -> clusters.Cluster:
    patch = _open.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("CUDA_VISIBLE_DEVICES", GPUS)
    with pytest.MonkeyPatch.context() as believed:
        launched = local_head.LocalHead
        believed.setattr(
            local_head, "LocalHead", lambda folder, options, *rest: launched(folder, {**options, "num_gpus": 4}, *rest)
        )
        cluster = _open.enter_context(start_cluster(ClusterSection(device="cpu"), RANKS))
    assert cluster.token_file is not None
    # As `ray start` does; otherwise a job might join another cluster on this machine.
    ray._private.utils.write_ray_address(cluster.address, str(cluster.token_file.parent / "ray"))
    return cluster
