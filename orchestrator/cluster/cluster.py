"""The Ray cluster of a run: one of its own on this machine, or an existing one joined."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from pentad.orchestrator.cluster.cluster_join import refuse_unjoinable
from pentad.orchestrator.cluster.ray_head import psutil, sweep
from pentad.orchestrator.config.sections import ClusterSection
from pentad.schedules.ir.errors import PentadError

OBJECT_STORE_BYTES = 200 << 20  # a run moves plans and step results, no tensors
LOOPBACK = "127.0.0.1"
END_SECONDS = 2.0  # for a local cluster to end by itself; while it starts, Ray may not let it
# What a driver's environment says to its workers on other nodes.
PASSED_ON = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "PYTHONPATH")
# No reports to Ray's makers, and no copies on stderr of errors that a group tells in its own words.
SILENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
# Every rank sees all GPUs of its node: what copies between two GPUs must see both.
SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True)
class Cluster:
    """A joined cluster. `device` is 'cuda' or 'cpu'; `dashboard` a URL, if there is one; `token_file` holds what the
    dashboard of a local cluster asks for; `note` is what the user should know of the choice of device. `abandon` ends
    what is left of a local cluster whose head is gone."""

    address: str
    local: bool
    device: str
    dashboard: str | None = None
    token_file: Path | None = None
    note: str = ""
    abandon: Callable[[], None] = lambda: None


@contextmanager
def start(section: ClusterSection, ranks: int) -> Iterator[Cluster]:
    """Starts or joins the cluster that the config asks for, and leaves it; nothing of a local one stays behind.

    Raises PentadError when that fails. A local cluster listens on this machine's loopback interface only.
    """
    with _local(section, ranks) if section.address == "local" else _joined(section) as cluster:
        yield cluster


@contextmanager
def _local(section: ClusterSection, ranks: int) -> Iterator[Cluster]:
    port = _dashboard_port(section) if section.dashboard else 0
    token = secrets.token_hex(32) if section.auth == "token" else ""
    options = {
        "num_cpus": ranks,  # Ray starts this many workers ahead
        "num_gpus": 0 if section.device == "cpu" else None,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": section.dashboard,
        "dashboard_host": LOOPBACK,
        "dashboard_port": port or None,
    }
    with ExitStack() as stack:
        stack.enter_context(_environment(_local_variables(token)))
        stack.enter_context(_loopback_only())
        folder, address, abandon = stack.enter_context(_head(options))
        stack.callback(ray.shutdown)
        _init(address=address)
        device, note = _device(section, ranks, local=True)
        url = f"http://{LOOPBACK}:{port}" if section.dashboard else None
        yield Cluster(address, True, device, url, _token_file(folder, token), note, abandon)


@contextmanager
def _head(options: dict[str, Any]) -> Iterator[tuple[Path, str, Callable[[], None]]]:
    """A head (see head.py): its private folder, its address, and what ends it by force.

    It ends with the block, or with this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="pentad-ray-", dir="/tmp"))  # short: socket paths have at most 107 bytes
    # -P: the folder that a run is started in is no place to look for modules.
    command = [sys.executable, "-P", "-m", "pentad.orchestrator.cluster.ray_head", str(folder), json.dumps(options)]
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answer = json.loads(process.stdout.readline() or '{"error": "its head ended at once"}')
        if "error" in answer:
            raise PentadError(f"cluster.address is local, but Ray did not start: {answer['error']}")
        yield folder, answer["address"], partial(sweep, process.pid, folder)
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        sweep(process.pid, folder)  # does nothing unless the head could not
        process.wait()
        process.stdout.close()


@contextmanager
def _joined(section: ClusterSection) -> Iterator[Cluster]:
    mode = os.environ.get("RAY_AUTH_MODE", section.auth)
    with ExitStack() as stack:
        stack.enter_context(_environment({"RAY_AUTH_MODE": mode, **SILENT}))
        refuse_unjoinable(section.address, mode)
        if _host(section.address) == LOOPBACK:  # else Ray looks for it at this machine's other address
            stack.enter_context(_loopback_only())
        stack.callback(ray.shutdown)
        try:
            context = _init(address=section.address, runtime_env={"env_vars": _passed_on()})
        except ray.exceptions.AuthenticationError as error:
            raise PentadError(
                f"cluster.auth is {mode!r}, but the Ray cluster at {section.address} refuses that: {_first_line(error)}"
            ) from error
        except (ConnectionError, RuntimeError, OSError, ValueError, AssertionError) as error:
            raise PentadError(
                f"cluster.address is {section.address!r}, where no Ray cluster answers: {_first_line(error)}"
            ) from error
        device, note = _device(section, 1, local=False)
        url = context.address_info.get("webui_url")
        yield Cluster(context.address_info["gcs_address"], False, device, f"http://{url}" if url else None, None, note)


def _passed_on() -> dict[str, str]:
    """What workers inherit of this environment, but for what their Ray job gives them: Ray refuses to hear it twice."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    given = set(job.get("env_vars", ())) | ({"PYTHONPATH"} if job else set())
    found = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)} | SEE_ALL_GPUS
    return {name: value for name, value in found.items() if name not in given}


def _host(address: str) -> str:
    """Of 'HOST:PORT'; '' of 'auto'."""
    host = address.rpartition(":")[0]
    return LOOPBACK if host == "localhost" else host


def _device(section: ClusterSection, ranks: int, *, local: bool) -> tuple[str, str]:
    """The device of the ranks. 'auto' falls back to CPUs on a machine of its own with too few GPUs, and says so."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if section.device != "auto":
        return section.device, ""
    if local and 0 < gpus < ranks:
        return "cpu", f"{ranks} ranks want a GPU each, but this machine has {gpus}: training on CPUs"
    return ("cuda" if gpus else "cpu"), ""


def _local_variables(token: str) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    found = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} | {
        name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ
    }
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    return found | auth | SEE_ALL_GPUS | SILENT | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process, which Ray's own processes inherit, and lets a Ray imported earlier read them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _reread()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _reread()


def _reread() -> None:
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray takes the loopback interface for no place of a cluster, except where this switch (read at import) is off."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _init(**options: Any) -> Any:
    """`ray.init` that leaves SIGTERM, which it would take, and stdout to the driver."""
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with _later(signal.SIGINT):
            context = ray.init(logging_level="error", log_to_driver=False, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ray._private.worker._worker_logs_enabled = False  # else it prints the deaths of workers
    return context


@contextmanager
def _later(number: int) -> Iterator[None]:
    """Holds a signal back until the block ends; a second one gets through.

    A KeyboardInterrupt out of the middle of `ray.init` leaves threads that crash this process when it ends.
    """
    handler, held = signal.getsignal(number), []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            handler(number, frame)

    signal.signal(number, hold)
    try:
        yield
    finally:
        signal.signal(number, handler)
        if len(held) == 1:
            signal.raise_signal(number)


def _dashboard_port(section: ClusterSection) -> int:
    """The port that the config names, or a free one. Raises PentadError when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((LOOPBACK, section.dashboard_port))
            return probe.getsockname()[1]
        except OSError as error:
            taken = section.dashboard_port
            raise PentadError(
                f"cluster.dashboard_port is {taken}, but {_holder(taken)} has that port ({error.strerror}); "
                "expected a free one, or 0 for any"
            ) from error


def _holder(port: int) -> str:
    """The process that listens on a port, as far as this user may see."""
    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN}
        names = [f"{psutil.Process(pid).name()} (pid {pid})" for pid in pids if pid]
    except psutil.Error:
        names = []
    return ", ".join(names) or "another program, perhaps another Ray dashboard,"


def _token_file(folder: Path, token: str) -> Path | None:
    if not token:
        return None
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(token)
    return path


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
