"""A process that holds a Ray cluster for one driver, in a session of its own, and takes it along when the driver goes.

`python -m pentad.orchestrator.cluster.ray_head FOLDER OPTIONS` prints one line of JSON, the cluster's address or the
reason why there is none, and runs until its standard input ends: when the driver closes it or dies. It then ends every
process of its session and removes the folder. Signals to the driver's group (Ctrl-C, a batch system's SIGTERM) do not
reach another session, so the ranks can still write a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

psutil = ray._private.node.psutil  # Ray carries its own


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    threading.Thread(target=_end_with_the_driver, args=(folder,), daemon=True).start()
    try:
        answer = {"address": _start(folder, options)}
    except Exception as error:
        answer = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
    print(json.dumps(answer), flush=True)
    threading.Event().wait()


def sweep(session: int, folder: Path, seconds: float = 5.0) -> None:
    """Kills every process of a session but this one, waits until they are gone, and deletes the folder."""
    until = time.monotonic() + seconds
    while (left := _members(session)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, options: dict[str, Any]) -> str:
    """Starts what `ray start --head` would, on free ports, without its autoscaler and its forwarding of logs."""
    parameters = RayParams(
        temp_dir=str(folder / "ray"),
        dashboard_agent_listen_port=0,
        no_monitor=True,
        include_log_monitor=False,
        **options,
    )
    return Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True).address


def _end_with_the_driver(folder: Path) -> None:
    sys.stdin.buffer.read()
    sweep(os.getsid(0), folder)
    os._exit(0)


def _members(session: int) -> list[Any]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # A zombie is gone: only its parent has yet to take note.
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


if __name__ == "__main__":
    main()
