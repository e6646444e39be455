"""The head process of a local Ray cluster, in a session of its own; the cluster ends with the driver.

`python -m pentad.orchestrator.cluster.ray_head FOLDER OPTIONS` prints one line of JSON, the cluster's address or the
error, and runs until its standard input ends because the driver closes it or dies. It then kills every process of its
session and removes FOLDER. Signals to the driver's process group (Ctrl-C, a batch system's SIGTERM) do not reach
another session, so the ranks can still write a checkpoint. The dashboard starts only on a line "dashboard" on standard
input: it takes two CPU seconds that the ranks need while they start.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

psutil = ray._private.node.psutil  # Ray vendors it


class HeadNode(Node):
    """Starts what `ray start --head` would, on free ports, but without an autoscaler, log forwarding and, at first, a
    dashboard."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        parameters = RayParams(
            temp_dir=str(folder / "ray"),
            dashboard_agent_listen_port=0,
            no_monitor=True,
            include_log_monitor=False,
            **options,
        )
        super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)

    def start_api_server(self, **_: Any) -> None:
        """Left to `start_dashboard`."""

    def start_dashboard(self) -> None:
        """Starts the dashboard. If that fails, the run continues without one, and the head's log says why."""
        try:
            super().start_api_server(include_dashboard=True, raise_on_failure=True)
        except Exception:
            traceback.print_exc()


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    wants_dashboard = threading.Event()
    threading.Thread(target=_obey_driver, args=(folder, wants_dashboard), daemon=True).start()
    try:
        node = HeadNode(folder, options)
    except Exception as error:
        print(json.dumps({"error": str(error).strip().partition("\n")[0] or type(error).__name__}), flush=True)
    else:
        print(json.dumps({"address": node.address}), flush=True)
        wants_dashboard.wait()
        node.start_dashboard()  # in this thread: the kernel kills what a thread started when that thread ends
    threading.Event().wait()


def kill_sessions(sessions: Container[int], seconds: float = 5.0) -> None:
    """Kills every process of these sessions but this one, and waits up to `seconds` until they are gone."""
    deadline = time.monotonic() + seconds
    while (left := members_of(sessions)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def members_of(sessions: Container[int]) -> list[Any]:
    """The processes of these sessions but this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # A zombie is dead; its parent has yet to reap it.
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def _obey_driver(folder: Path, wants_dashboard: threading.Event) -> None:
    for line in sys.stdin:
        if line == "dashboard\n":
            wants_dashboard.set()
    kill_sessions({os.getsid(0)})
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
