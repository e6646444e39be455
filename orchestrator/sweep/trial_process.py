"""The process of a trial: `python -m pentad.orchestrator.sweep.trial_process CONFIG PARENT` trains and prints one line
of JSON: {}, or the error and its fault. It ends with its parent process PARENT."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> int:
    file, parent = Path(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    from rich.console import Console

    from pentad.orchestrator.api.training import run_displayed
    from pentad.orchestrator.config.config import load
    from pentad.schedules.ir.errors import PentadError, ScheduleError

    try:
        run_displayed(load(file), Console(file=sys.stderr))
    except (PentadError, ScheduleError) as error:
        print(json.dumps({"error": str(error).partition("\n")[0], "fault": getattr(error, "fault", "")}))
        return 1
    print("{}")
    return 0


def end_with(parent: int) -> None:
    """Has the kernel kill this process when the sweep's process dies, however it dies; its Ray head ends with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
