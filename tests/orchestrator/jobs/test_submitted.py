"""The life of a run submitted to a two-node cluster with a token: monitored, paused, stopped and resubmitted."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray._private.node import Node
from ray._private.parameter import RayParams
from started_cluster import start_cluster
from submitted_runs import SMALL, STEPS, steps

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.local_head import LOOPBACK, OBJECT_STORE_BYTES
from pentad.orchestrator.cluster.ray_head import psutil
from pentad.orchestrator.config.sections import ClusterSection

OPTIONS = (*SMALL, "checkpoint.every=20")  # limits calls to 20 steps


class User:
    """Runs commands against a cluster and queries its dashboard, with the token."""

    def __init__(self, cluster: clusters.Cluster, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
        assert cluster.token_file is not None
        self.cluster, self.capsys, self.words = cluster, capsys, (*OPTIONS, *words)
        self.at = ("--address", str(cluster.dashboard))
        self.headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}

    def pentad(self, *arguments: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        return main(list(arguments)), *self.capsys.readouterr()

    def query(self, *arguments: str) -> Any:
        """The JSON output of a command, which must succeed."""
        status, out, err = self.pentad(*arguments, "--json")
        assert status == 0, (out, err)
        return json.loads(out)

    def submit(self, run: str, *more: str) -> Any:
        return self.query("submit", *self.words, f"run.name={run}", *self.at, *more)

    def job(self, name: str) -> Any:
        return next(job for job in self.query("jobs", *self.at)["jobs"] if job["job"] == name)

    def slices(self, name: str) -> set[tuple[str, str]]:
        """Row and name of each pentad slice in a job's Perfetto trace from Ray's dashboard."""
        number = self.dashboard(f"jobs/{name}")["driver_info"]["id"]
        events = self.dashboard(f"v0/tasks/timeline?job_id={number}")
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        pentad_events = [e for e in events if e["ph"] == "X" and e["args"].get("func_or_class_name") == "pentad.step"]
        return {(rows[e["pid"], e["tid"]], e["name"]) for e in pentad_events}

    def tasks(self) -> list[str]:
        """Names of the tasks known to the cluster, which updates them once a second."""
        return [task["name"] for task in self.dashboard("v0/tasks?detail=1&limit=10000")["data"]["result"]["result"]]

    def dashboard(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.cluster.dashboard}/api/{path}", headers=self.headers)
        return json.loads(urllib.request.urlopen(request, timeout=20).read())


@pytest.fixture
def user(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> Iterator[User]:
    """A user of a cluster of two nodes with room for one rank each; jobs run this `python`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        with start_cluster(ClusterSection(device="cpu"), 1) as head, second_node(head.address):
            assert head.token_file is not None
            # As `ray start` does: otherwise a job might join another cluster on this machine.
            ray._private.utils.write_ray_address(head.address, str(head.token_file.parent / "ray"))
            yield User(head, capsys, (f"run.folder={tmp_path}", f"data.path={corpus}"))


@contextmanager
def second_node(address: str) -> Iterator[None]:
    parameters = RayParams(
        gcs_address=address,
        node_ip_address=LOOPBACK,
        num_cpus=1,
        num_gpus=0,
        object_store_memory=OBJECT_STORE_BYTES,
        dashboard_agent_listen_port=0,
        include_log_monitor=False,
    )
    node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)
    try:
        eventually(lambda: ray.cluster_resources().get("CPU"), lambda cpus: cpus == 2)
        yield
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def eventually(ask: Callable[[], Any], done: Callable[[Any], bool]) -> Any:
    """The first answer that is `done`; asks until the test times out."""
    while not done(answer := ask()):
        time.sleep(0.05)
    return answer


def serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("uninterrupted")
def test_a_submitted_run_is_paused_resumed_stopped_and_resubmitted_without_loss(
    user: User, runs: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    user.submit("parts", "--name", "first", "--no-follow")
    eventually(lambda: steps(parts), bool)

    paused = user.query("pause", str(parts))
    status = user.query("status", str(parts))
    assert (status["run"], status["state"], status["mesh"], status["generation"]) == ("parts", "paused", "pp2", 1)
    assert status["step"] == paused["step"] == len(steps(parts))
    assert [rank["coordinates"]["pp"] for rank in status["ranks"]] == [0, 1]
    assert len({psutil.Process(rank["pid"]).ppid() for rank in status["ranks"]}) == 2  # one rank per node
    assert user.job("first")["endpoints"] == status["endpoints"]
    actors = user.dashboard("v0/actors?detail=1")["data"]["result"]["result"]
    assert {(a["repr_name"], a["name"], a["state"]) for a in actors if "pp" in a["repr_name"]} == {
        (f"parts dp0 pp{pp}", f"pentad/parts/dp0-pp{pp}", "ALIVE") for pp in (0, 1)
    }
    eventually(
        user.tasks, lambda names: any(re.fullmatch(r"run\(\d+, \d+, True, \(\)\) in generation 1", n) for n in names)
    )
    metrics = urllib.request.urlopen(f"http://{status['endpoints']['metrics']}/metrics", timeout=5).read().decode()
    assert re.search(r'^pentad_run_state\{.*"paused".*\} 1.0$', metrics, re.MULTILINE)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(status["endpoints"]["page"], timeout=5)
    page = urllib.parse.urlsplit(user.query("page", str(parts))["page"])
    asked = urllib.request.Request(f"{status['endpoints']['page']}state.json")
    asked.add_header("Authorization", f"Bearer {urllib.parse.parse_qs(page.query)['token'][0]}")
    state = json.load(urllib.request.urlopen(asked, timeout=20))
    assert (state["state"], state["step"], len(state["kept"])) == ("paused", paused["step"], min(5, paused["step"]))
    assert state["curves"]["loss"] == [loss for _, loss, _ in steps(parts)]

    shown = eventually(lambda: user.slices("first"), lambda found: len({row for row, _ in found}) == 2)
    names = {f"{stage}{op}{microbatch}" for stage in "01" for op in ("F", "BW") for microbatch in "01"}
    assert {(f"worker:000{name[0]}", name) for name in names} <= shown

    saved = user.query("checkpoint", "save", str(parts))["step"]
    assert saved == paused["step"]
    assert user.query("resume", str(parts))["state"] == "running"
    eventually(lambda: len(steps(parts)), lambda done: done > saved)
    assert serves(status["endpoints"]["control"])
    done = user.query("pause", str(parts))["step"]  # else a fast machine might finish before the stop

    stopped = user.query("stop", "first", *user.at)
    assert stopped["outcome"] == f"job first was stopped after {done} steps, with a checkpoint in {parts}"
    assert saved < done == len(steps(parts)) < STEPS
    assert user.query("status", str(parts))["state"] == "stopped"
    second = user.submit("parts", "--name", "second")
    assert (second["status"], second["outcome"]) == ("SUCCEEDED", f"job second finished; the run is in {parts}")
    assert f"resuming from step {done}" in user.pentad("logs", "second", *user.at)[1]
    refused = (1, "", f"pentad: run parts is finished at step {STEPS}: expected a live one\n")
    assert user.pentad("pause", str(parts)) == refused

    assert steps(parts) == steps(runs / "whole")
    assert len(steps(parts)) == STEPS
    assert user.query("verify", str(parts))["steps"] == STEPS
