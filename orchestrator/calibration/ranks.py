"""Processes on this machine, one a rank, that measure together."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from pentad.orchestrator.activations.kernel_choice import Shape
from pentad.orchestrator.doctor.probe import last_error
from pentad.schedules.ir.errors import PentadError

PROBE = "pentad.workers.health.calibration"
LIMIT = 170.0  # seconds, from the start of the processes
Report = Callable[[int, int], None]  # (measurements done, in total)


def run_ranks(
    device: str,
    gpus: Mapping[int, int],
    address: str,
    hosts: Sequence[int],
    kernels: Sequence[Shape],
    report: Report | None = None,
) -> dict[str, Any] | None:
    """Runs ranks on these GPUs, together with those of other hosts, until all have measured. `hosts` has the host of
    every rank; all implementations of the calls `kernels` are timed. Returns what rank 0 found, if it is among these
    ranks. Raises PentadError if a rank fails or takes too long."""
    found: dict[str, Any] | None = None
    with ExitStack() as stack:
        errors = {rank: stack.enter_context(tempfile.TemporaryFile("w+")) for rank in gpus}
        started: list[subprocess.Popen[str]] = []

        def end() -> None:
            for process in started:
                process.kill()

        stack.callback(end)
        for rank, gpu in gpus.items():
            command = [sys.executable, "-P", "-m", PROBE, device, str(gpu), address, str(rank)]
            command += [",".join(map(str, hosts)), json.dumps(kernels)]
            out = subprocess.DEVNULL if rank else subprocess.PIPE  # only rank 0 reports
            process = subprocess.Popen(command, stdout=out, stderr=errors[rank], text=True)
            started.append(stack.enter_context(process))
        timer = threading.Timer(LIMIT, end)
        stack.callback(timer.cancel)
        timer.start()
        for process in started:
            for line in process.stdout or ():
                row = json.loads(line) if line.startswith("{") else {}  # libraries print as well
                found = row.get("rates", found)
                if report is not None and "done" in row:
                    report(row["done"], row["total"])
        for process, file in zip(started, errors.values(), strict=True):
            if status := process.wait():
                late = not timer.is_alive()
                file.seek(0)
                reason = f"no end within {LIMIT:.0f} s" if late else last_error(file.read(), status)
                raise PentadError(f"calibration failed: {reason}")
    return found
