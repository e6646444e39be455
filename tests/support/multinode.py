"""A Ray cluster of several removable nodes on this machine, and runs of `pentad train` on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import gpus
import ray
import torch
from footprint import Footprint
from ray._private.node import Node
from ray._private.parameter import RayParams
from redis_server import redis_server

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.local_head import NO_IDLE_WORKERS, USUAL_PRIORITY
from pentad.orchestrator.cluster.ray_head import psutil
from pentad.orchestrator.records.checkpoint_places import checkpoints_in
from pentad.orchestrator.records.json_lines import read_lines
from pentad.workers.checkpoint.checkpoint import newest
from pentad.workers.checkpoint.shards import read

# Health checks by the head: one a second; a node is given up after three failures.
HEALTH = {"period_ms": "1000", "timeout_ms": "3000", "failure_threshold": "3", "initial_delay_ms": "1000"}
PREEMPTION = 2
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
COMMAND = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "train")
CLEAR = """
import sys
from contextlib import suppress
import ray
from ray.util.placement_group import PlacementGroup, PlacementGroupID
from pentad.orchestrator.cluster.cluster import loopback_allowed

with loopback_allowed():
    ray.init(address=sys.argv[1], log_to_driver=False)
for actor in ray.util.list_named_actors(all_namespaces=True):
    with suppress(ValueError):  # it has ended
        ray.kill(ray.get_actor(**actor))
for key, facts in ray.util.placement_group_table().items():
    if facts["state"] != "REMOVED":
        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(key))))
"""


class Cluster:
    """A head with `room` for ranks, and nodes with room for some; on GPUs, each of a node's ranks has a place."""

    def __init__(self, folder: Path, places: int = 0, room: int = 0) -> None:
        self.folder, self.places = folder, places
        self.head = self._node(room)
        self.address: str = self.head.gcs_address
        self.nodes: list[Node] = []

    def resize(self, *sizes: int, labels: Iterable[dict[str, str]] = ()) -> None:
        """Adds and removes nodes until there is one for each of `sizes`, with room for that many ranks. New nodes get
        these labels in turn."""
        given = iter(labels)
        expected = Counter(sizes)
        for node in list(self.nodes):
            if _raylet(node).poll() is None and expected[node.cpus] > 0:
                expected[node.cpus] -= 1
            else:
                self.nodes.remove(node)
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for cpus in expected.elements():
            self.nodes.append(self._node(cpus, next(given, {})))

    def node_of(self, pid: int) -> Node:
        """The node of a rank's process."""
        parent = psutil.Process(pid).ppid()
        return next(node for node in self.nodes if _raylet(node).pid == parent)

    def ranks(self) -> list[str]:
        """Processes of ranks, and the keeper of their lease, whether running, stopped or exiting."""
        return list(self._actors().values())

    def rank_pids(self) -> list[int]:
        return [pid for pid, title in self._actors().items() if not title.startswith("ray::Keeper")]

    def kill_keeper(self) -> None:
        """Kills the process that keeps a run's lease."""
        (pid,) = [pid for pid, title in self._actors().items() if title.startswith("ray::Keeper")]
        os.kill(pid, signal.SIGKILL)

    def free_cpus(self) -> float:
        """CPUs that nothing on the cluster has reserved."""
        client = ray._raylet.GcsClient(address=self.address)
        loads = client.get_all_resource_usage(timeout=10).resource_usage_data.batch
        return sum(load.resources_available.get("CPU", 0.0) for load in loads)

    def clear(self) -> None:
        """Ends what is left of runs that did not end as their test expected, as the next one needs the room."""
        subprocess.run([sys.executable, "-P", "-c", CLEAR, self.address], check=True, timeout=60)

    def _actors(self) -> dict[int, str]:
        titles = {}
        for node in (self.head, *self.nodes):
            with suppress(psutil.Error):
                for process in psutil.Process(_raylet(node).pid).children():
                    titles[process.pid] = " ".join(process.cmdline())
        return {pid: t for pid, t in titles.items() if t.startswith("ray::") and not t.startswith(RAYS_OWN)}

    def board(self, pid: int) -> Path:
        """The file to which a rank writes its progress."""
        return Path(self.node_of(pid).get_session_dir_path()) / f"pentad-progress-{pid}"

    def drain(self, node: Node, seconds: float) -> None:
        """Announces a node's preemption, as a cloud does before reclaiming a machine."""
        deadline = int((time.time() + seconds) * 1000)
        accepted, reason = ray._raylet.GcsClient(address=self.address).drain_node(
            node.node_id, PREEMPTION, "test", deadline
        )
        assert accepted, reason

    def stop_head(self) -> None:
        """Kills the head's GCS, the process that knows the cluster's state."""
        self.head.kill_gcs_server(check_alive=False)

    def start_head(self) -> None:
        """Starts it at the same address; what a persistent cluster has stored is available again."""
        self.head._ray_params.gcs_server_port = int(self.address.rpartition(":")[2])
        self.head.start_gcs_server()

    def stop(self) -> None:
        self.resize()
        self.head.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def _node(self, cpus: int, labels: dict[str, str] | None = None) -> Node:
        head = not hasattr(self, "head")
        where = {} if head else {"gcs_address": self.address, "redis_address": self.address}
        taken = [] if head else [place for node in self.nodes for place in node.places]
        free = [place for place in range(self.places) if place not in taken][:cpus]
        parameters = RayParams(
            num_cpus=cpus,
            num_gpus=len(free),
            object_store_memory=100 << 20,
            temp_dir=str(self.folder),
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            node_manager_port=0,
            dashboard_agent_listen_port=0,
            min_worker_port=0,
            max_worker_port=0,
            labels=labels,
            **where,
        )
        known = self._logs()
        with clusters.environment(gpus.node_of(free) if self.places else {}):
            try:
                node = Node(parameters, head=head, shutdown_at_exit=True, spawn_reaper=True)
            except Exception as error:  # Ray's own error only says that it timed out
                new = [f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in self._logs() - known]
                raise RuntimeError("\n".join([f"{error} Its logs: {len(new)}", *new])) from None
        node.cpus, node.places = cpus, free
        return node

    def _logs(self) -> set[Path]:
        return set(self.folder.glob("session_[0-9]*/logs/*.*"))


def kill(node: Node, how: int = signal.SIGKILL) -> None:
    """Kills a node's processes as if it lost power, or signals it to terminate."""
    _raylet(node).send_signal(how)
    _raylet(node).wait()


def _raylet(node: Node) -> subprocess.Popen[bytes]:
    return node.all_processes["raylet"][0].process


@contextmanager
def multinode_cluster(
    places: int = 0, *, room: int = 0, tables: Literal["", "disk", "redis"] = ""
) -> Iterator[Cluster]:
    """A cluster that leaves nothing behind. Its head can be killed and restarted if its `tables` are kept somewhere."""
    variables = {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
    variables |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= USUAL_PRIORITY | NO_IDLE_WORKERS
    folder = Path(
        tempfile.mkdtemp(prefix="pentad-nodes-", dir="/tmp")
    )  # a short path: socket paths have at most 107 bytes
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        match tables:
            case "disk":
                (folder / "gcs").mkdir()
                variables |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
            case "redis":
                variables["RAY_REDIS_ADDRESS"] = stack.enter_context(redis_server())
        stack.enter_context(clusters.environment(variables))
        stack.enter_context(clusters.loopback_allowed())
        cluster = Cluster(folder, places, room)
        stack.callback(cluster.stop)
        yield cluster


class Run:
    """`pentad train` in its own process, on an existing cluster."""

    def __init__(self, cluster: Cluster, folder: Path, *overrides: str, command: tuple[str, ...] = COMMAND) -> None:
        self.cluster, self.folder, self.footprint = cluster, folder / "run", Footprint()
        arguments = [f"run.folder={folder}", "run.name=run", f"cluster.address={cluster.address}", *overrides]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**self.footprint.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        folder.mkdir(exist_ok=True)
        self.printed = folder / "printed"
        with self.printed.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.folder / "journal.jsonl") if row["event"] in kinds or not kinds]

    def state(self, steps: int) -> dict[str, torch.Tensor]:
        """The state in the newest checkpoint, which must be of this many steps."""
        found = newest(checkpoints_in(self.folder)).checkpoint
        assert found is not None and found.step == steps
        return read(found, found.tensors)

    def pids(self) -> list[int]:
        """PIDs of the ranks when they were first placed."""
        return [rank["pid"] for rank in self.events("place")[0]["ranks"]]

    def wait_for(self, true: Callable[[], object], seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, self.describe()
            assert time.monotonic() < until, self.describe()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.rows()) > step)

    def wait_for_step_since_recovery(self) -> None:
        """Waits until the ranks have completed a step since the newest recovery, if there was one."""
        recovered = self.events("recovered")
        self.wait_for_step(recovered[-1]["step"] if recovered else -1)

    def wait_for_checkpoint(self, step: int) -> None:
        """Waits until one of at least this many steps is committed; training continues meanwhile."""
        self.wait_for(lambda: any(row["step"] >= step for row in self.events("checkpoint")))

    def signal_ranks(self, *ranks: int, how: int = signal.SIGKILL) -> None:
        for pid in [self.pids()[rank] for rank in ranks]:
            os.kill(pid, how)

    def end(self, seconds: float = 200.0) -> int:
        return self.process.wait(seconds)

    def assert_gone(self) -> None:
        """Asserts that no process of the run is left on any node (and so no port either)."""
        self.footprint.assert_gone()
        until = time.monotonic() + 5
        while (left := self.cluster.ranks()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left, left

    def describe(self) -> str:
        """Output, events and steps of a run, for the message of a failed assertion."""
        events = "\n".join(json.dumps(row) for row in self.events())
        return f"{self.printed.read_text()}\n{events}\nsteps {[row['step'] for row in self.rows()]}"

    def stop(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
