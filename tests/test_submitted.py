"""The life of a submitted run on a cluster of two nodes that asks for a token: seen, paused, resumed, stopped, resubmitted."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray._private.node import Node
from ray._private.parameter import RayParams

from pentad.orchestrator import cluster as clusters
from pentad.orchestrator.cli import main
from pentad.orchestrator.head import psutil
from pentad.orchestrator.sections import ClusterSection

STEPS = 600
SMALL = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64"),
    *("batch.sequences=2", "batch.sequence_length=16", "schedule.name=1f1b", "schedule.microbatches=2", "mesh.pp=2"),
    *("cluster.device=cpu", f"run.steps={STEPS}"),
)


class TwoNodes:
    """A cluster whose nodes have room for one rank each, and what a user of it types and asks."""

    def __init__(self, cluster: clusters.Cluster, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
        assert cluster.token_file is not None
        self.cluster, self.capsys, self.words = cluster, capsys, words
        self.at = ("--address", str(cluster.dashboard))
        self.headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}

    def pentad(self, *arguments: str) -> str:
        """What a command line prints that does what it says."""
        self.capsys.readouterr()
        status = main(list(arguments))
        printed = self.capsys.readouterr()
        assert (status, printed.err) == (0, ""), printed
        return printed.out

    def asked(self, *arguments: str) -> Any:
        return json.loads(self.pentad(*arguments, "--json"))

    def submit(self, run: str, *more: str) -> str:
        return self.pentad("submit", *SMALL, *self.words, f"run.name={run}", *self.at, *more)

    def job(self, name: str) -> dict[str, Any]:
        (found,) = (job for job in self.asked("jobs", *self.at)["jobs"] if job["job"] == name)
        return found

    def dashboard(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.cluster.dashboard}/api/{path}", headers=self.headers)
        return json.loads(urllib.request.urlopen(request, timeout=20).read())


@pytest.fixture
def two(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        with clusters.start(ClusterSection(device="cpu"), 1) as head, second_node(head):
            # As `ray start` does: else a job may join another cluster of this machine.
            assert head.token_file is not None
            ray._private.utils.write_ray_address(head.address, str(head.token_file.parent / "ray"))
            yield TwoNodes(head, capsys, (f"run.folder={tmp_path}", f"data.path={corpus}", "model.vocab=512"))


def second_node(head: clusters.Cluster) -> Any:
    raise NotImplementedError
