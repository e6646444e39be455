"""Launches the Ray head of a local run (see ray_head.py). Does not import ray, so Ray starts while the driver plans."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.ports import reserve
from pentad.orchestrator.config.sections import ClusterSection
from pentad.schedules.ir.errors import PentadError

OBJECT_STORE_BYTES = 200 << 20  # a run sends plans and step results through it, no tensors
LOOPBACK = "127.0.0.1"
SHUTDOWN_SECONDS = 2.0  # for the head to exit by itself
# No usage reports, no copies on stderr of errors that a WorkerGroup reports itself, and no full second's wait for the
# report of an actor's death: if its node is lost, so is the process that would send it.
DRIVERS_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_timeout_ms_task_wait_for_death_info": "500",
}
# Every rank sees all GPUs of its node, as copies between two GPUs require.
SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# Ray would start a process per CPU when a driver connects, too late for the ranks, which get processes of their own.
NO_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
# By default Ray gives workers a niceness of 15: anything else on the machine would delay a rank's kernel launches.
USUAL_PRIORITY = {"RAY_worker_niceness": "0"}
# A local cluster stores nothing: storage settings in the environment are meant for another cluster's head.
IN_MEMORY = {"RAY_gcs_storage": "memory", "RAY_REDIS_ADDRESS": None}


class LocalHead:
    """A head process that is starting. `dashboard` is the URL that its dashboard will have, None without one;
    `token_file` holds the token that Ray's interfaces require, None if they require none."""

    def __init__(self, folder: Path, options: dict[str, Any], dashboard: str | None, token: str) -> None:
        self.folder, self.dashboard = folder, dashboard
        self.token_file = _write_token(folder, token) if token else None
        # -P keeps the current folder off sys.path.
        command = [sys.executable, "-P", "-m", "pentad.orchestrator.cluster.ray_head", str(folder), json.dumps(options)]
        pipe = subprocess.PIPE
        with (folder / "head.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
            )

    def wait_for_address(self) -> str:
        """The cluster's HOST:PORT, once it is up. Raises PentadError if Ray does not start."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline() or '{"error": "its head process exited"}')
        if "error" in answer:
            raise PentadError(f"cluster.address is local, but Ray did not start: {answer['error']}")
        return answer["address"]

    def start_dashboard(self) -> None:
        """Starts the dashboard, if there is to be one. Returns at once; starting takes about two CPU seconds."""
        assert self.process.stdin is not None
        if self.dashboard:
            with suppress(OSError):  # the head is gone, which is reported elsewhere
                self.process.stdin.write("dashboard\n")
                self.process.stdin.flush()

    def kill(self) -> None:
        """Kills whatever is left of the cluster and removes its folder."""
        from pentad.orchestrator.cluster.ray_head import kill_sessions  # imports ray

        kill_sessions({self.process.pid})
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SHUTDOWN_SECONDS)
        if self.process.poll() is None or self.folder.exists():
            self.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def launch(section: ClusterSection, ranks: int) -> Iterator[LocalHead | None]:
    """Launches the head of a local cluster with room for `ranks` and returns while it starts; None for any other
    cluster.address. The cluster listens on the loopback interface only, and ends with the block or with this process.

    Raises PentadError if cluster.dashboard_port is taken, or this process is already connected to a Ray cluster.
    """
    is_local = section.address == "local"
    has_dashboard = is_local and section.dashboard
    held = reserve("cluster.dashboard_port", LOOPBACK, section.dashboard_port) if has_dashboard else nullcontext()
    with held as port:  # Ray's own daemons start before its dashboard and might take the port
        _require_no_session(section.address)
        if is_local:
            yield from _launch(section, ranks, port.getsockname()[1] if port else None)
        else:
            yield None


def _launch(section: ClusterSection, ranks: int, port: int | None) -> Iterator[LocalHead]:
    token = secrets.token_hex(32) if section.auth == "token" else ""
    options = {
        "num_cpus": ranks,
        "num_gpus": 0 if section.device == "cpu" else None,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": section.dashboard,
        "dashboard_host": LOOPBACK,
        "dashboard_port": port,
    }
    folder = Path(tempfile.mkdtemp(prefix="pentad-ray-", dir="/tmp"))  # short: socket paths have at most 107 bytes
    with environment(_head_variables(token)):
        head = LocalHead(folder, options, f"http://{LOOPBACK}:{port}" if port else None, token)
        try:
            yield head
        finally:
            head.close()


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables of this process, which Ray's processes inherit, for the block; None removes one. Ray
    reads them again if it is already imported."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _reload_ray_config()


def _require_no_session(address: str) -> None:
    """Raises PentadError if this process is connected to a Ray cluster: it can have only one, and a run's needs its own
    environment variables."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        found = f"but this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address} already"
        raise PentadError(f"cluster.address is {address}, {found}: expected a ray.shutdown() before training")


def _reload_ray_config() -> None:
    if ray := sys.modules.get("ray"):
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _head_variables(token: str) -> dict[str, str | None]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interfaces = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    ours = SEE_ALL_GPUS | USUAL_PRIORITY | NO_IDLE_WORKERS | DRIVERS_RAY
    return {**interfaces, **auth, **ours, **IN_MEMORY, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _write_token(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(token)
    return path
