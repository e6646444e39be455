"""The Ray cluster of a run: a local one started for it, or an existing one that it joins."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from pentad.orchestrator.cluster.cluster_join import check_joinable
from pentad.orchestrator.cluster.local_head import DRIVERS_RAY, LOOPBACK, SEE_ALL_GPUS, LocalHead, environment
from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.planning.hardware import local_device
from pentad.schedules.ir.errors import PentadError

# Environment variables of the driver that are passed on to its workers on other nodes.
PASSED_ON = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "PYTHONPATH")


@dataclass(frozen=True)
class Cluster:
    """A joined cluster. `device` is 'cuda' or 'cpu'; `dashboard` is the URL of its dashboard, if any; `token_file`
    holds the token of a local cluster; `note` explains the choice of device to the user. For a local cluster,
    `start_dashboard` starts the dashboard and `kill` ends what is left once the head is gone."""

    address: str
    local: bool
    device: str
    dashboard: str | None = None
    token_file: Path | None = None
    note: str = ""
    start_dashboard: Callable[[], None] = lambda: None
    kill: Callable[[], None] = lambda: None

    @property
    def notes(self) -> list[str]:
        """What the user is told about the cluster."""
        found = [self.note] if self.note else []
        if self.dashboard:
            token = f" (token in {self.token_file})" if self.token_file else ""
            when = " (starts after the first step)" if self.local else ""
            found.append(f"Ray dashboard{when}: {self.dashboard}{token}")
        return found


@contextmanager
def join(section: ClusterSection, ranks: int, head: LocalHead | None) -> Iterator[Cluster]:
    """Joins the cluster of `head` (None: the existing one at cluster.address) for the block. Raises PentadError if that
    fails."""
    with ExitStack() as stack:
        if head is None:
            yield _join_existing(section, stack)
            return
        address = head.wait_for_address()
        stack.enter_context(loopback_allowed())
        stack.callback(ray.shutdown)
        _init(address=address)
        device, note = local_device(section, ranks)
        yield Cluster(
            address, True, device, head.dashboard, head.token_file, note, head.start_dashboard, head.kill
        )  # fmt: skip


def _join_existing(section: ClusterSection, stack: ExitStack) -> Cluster:
    mode = os.environ.get("RAY_AUTH_MODE", section.auth)
    stack.enter_context(environment({"RAY_AUTH_MODE": mode, **DRIVERS_RAY}))
    check_joinable(section.address, mode)
    if section.address.rpartition(":")[0] in (LOOPBACK, "localhost"):  # otherwise Ray uses this machine's other address
        stack.enter_context(loopback_allowed())
    stack.callback(ray.shutdown)
    try:
        context = _init(address=section.address, runtime_env={"env_vars": _passed_on()})
    except ray.exceptions.AuthenticationError as error:
        raise PentadError(
            f"cluster.auth is {mode!r}, but the Ray cluster at {section.address} refuses it: {_first_line(error)}"
        ) from error
    except (ConnectionError, RuntimeError, OSError, ValueError, AssertionError) as error:
        raise PentadError(
            f"cluster.address is {section.address!r}, where no Ray cluster answers: {_first_line(error)}"
        ) from error
    gpus = ray.cluster_resources().get("GPU", 0)
    device = section.device if section.device != "auto" else "cuda" if gpus else "cpu"
    url = context.address_info.get("webui_url")
    return Cluster(context.address_info["gcs_address"], False, device, f"http://{url}" if url else None)


def _passed_on() -> dict[str, str]:
    """Environment variables for the workers, except those that the Ray job sets: Ray refuses to set one twice."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    given = set(job.get("env_vars", ())) | ({"PYTHONPATH"} if job else set())
    found = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)} | SEE_ALL_GPUS
    return {name: value for name, value in found.items() if name not in given}


@contextmanager
def loopback_allowed() -> Iterator[None]:
    """Lets Ray use the loopback interface for a cluster, which it refuses unless this constant, read at import, is
    off."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _init(**options: Any) -> Any:
    """`ray.init` that leaves the SIGTERM handler and stdout to the driver."""
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with _deferred(signal.SIGINT):
            context = ray.init(logging_level="error", log_to_driver=False, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ray._private.worker._worker_logs_enabled = False  # otherwise it prints the deaths of workers
    return context


@contextmanager
def _deferred(number: int) -> Iterator[None]:
    """Delivers a signal when the block ends; a second one interrupts it.

    A KeyboardInterrupt in the middle of `ray.init` leaves threads that crash this process when it exits.
    """
    handler, received = signal.getsignal(number), []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            handler(number, frame)

    signal.signal(number, receive)
    try:
        yield
    finally:
        signal.signal(number, handler)
        if len(received) == 1:
            signal.raise_signal(number)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
