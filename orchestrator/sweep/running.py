"""A running trial: a process of its own, which is ended at its deadline at the latest."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from pentad.orchestrator.config.config import dump
from pentad.orchestrator.monitoring.runfolder import CONFIG, METRICS
from pentad.orchestrator.planning.formatting import format_duration
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.sweep.free_devices import FreeDevices
from pentad.orchestrator.sweep.results import Outcome, TrialRow, writable
from pentad.orchestrator.sweep.trials import Trial
from pentad.schedules.ir.errors import PentadError

PROCESS = "pentad.orchestrator.sweep.trial_process"
HEAD_SECONDS = 5.0  # for a Ray head whose driver is gone to end its processes and remove its files
KILL_SECONDS = 10.0  # for killed processes to be gone, on a busy machine
STATUS_SECONDS = 3.0
MOST_RANKS = 4  # most ranks named in a sentence
FAULTS: dict[str, Outcome] = {"memory": "memory", "hang": "hang"}  # outcomes by the fault of a WorkerError


class RunningTrial:
    """A trial's process on its `devices`. The trials' configurations, answers and output go to the folder `logs`."""

    def __init__(self, trial: Trial, free: FreeDevices, devices: tuple[str, ...], deadline: float, logs: Path) -> None:
        assert trial.config is not None
        self.trial, self.devices, self.deadline = trial, devices, deadline
        self.folder = Path(trial.config.run.folder) / trial.name
        self.log, self.answer = logs / f"{trial.name}.log", logs / f"{trial.name}.json"
        file = logs / f"{trial.name}.yaml"
        shutil.rmtree(self.folder, ignore_errors=True)  # left by an interruption
        with writable(logs.parent):
            file.write_text(dump(trial.config), encoding="utf-8")
            self.began = time.monotonic()
            with self.answer.open("w") as answer, self.log.open("w") as log:
                # -P keeps the current folder off sys.path.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", PROCESS, str(file), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=answer,
                    stderr=log,
                    env={**os.environ, **free.variables(devices)},
                    start_new_session=True,
                )
        self.sessions = {self.process.pid}

    def poll(self) -> TrialRow | None:
        """The trial's row once it is over, at its deadline at the latest, with all its processes gone; else None."""
        status = self.process.poll()
        if status is None:
            self.sessions |= sessions_below(self.process.pid)
            if time.monotonic() - self.began < self.deadline:
                return None
            cause = f"after {format_duration(self.deadline)}: {self._standing()}"
            self.end()
            return self._row("deadline", cause)
        self.end()
        error, fault = self._error(status)
        return self._row(FAULTS.get(fault, "failed"), error) if error else self._measured()

    def end(self) -> None:
        """Kills the trial and all processes that it has started."""
        from pentad.orchestrator.cluster.ray_head import kill_sessions, members_of  # imports ray

        self.sessions |= sessions_below(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + HEAD_SECONDS
        while members_of(self.sessions) and time.monotonic() < until:
            time.sleep(0.05)
        kill_sessions(self.sessions, KILL_SECONDS)

    def _error(self, status: int) -> tuple[str, str]:
        """Why the trial failed ('' if it did not), and the kind of a rank's fault ('' if unknown)."""
        with suppress(ValueError, OSError):
            answer = json.loads(self.answer.read_text(encoding="utf-8"))
            return re.sub(r" \(more in [^)]*\)$", "", answer.get("error", "")), answer.get("fault", "")
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if status < 0:
            return f"its process was killed ({signal.Signals(-status).name})", ""
        return f"its process ended with status {status}: {lines[-1] if lines else 'it said nothing'}", ""

    def _standing(self) -> str:
        """What the trial's ranks were doing, in words."""
        steps = len(self._metrics())
        from pentad.orchestrator.control.control_client import NotLive, connect  # imports grpc

        if not (self.folder / CONFIG).exists():
            return "it was still starting"
        try:
            with connect(self.folder) as client:
                ranks = client.status(STATUS_SECONDS)["ranks"]
        except NotLive:
            return (
                "its ranks were still starting" if not steps else f"it ended after {steps} steps, but not its process"
            )
        except PentadError:
            return f"its driver did not answer, after {steps} steps"
        return f"{standing_text(ranks)}, after {steps} steps"

    def _metrics(self) -> list[dict[str, Any]]:
        try:
            return read_lines(self.folder / METRICS)
        except PentadError:
            return []

    def _row(self, outcome: Outcome, cause: str) -> TrialRow:
        seconds = time.monotonic() - self.began
        return self.trial.row._replace(outcome=outcome, cause=" ".join(cause.split()), wall_seconds=round(seconds, 3))

    def _measured(self) -> TrialRow:
        """The row with medians over all steps but the first, which warms up."""
        rows = self._metrics()
        if not rows:
            return self._row("failed", "it ended without a step")
        rows = rows[1:] or rows

        def typical(name: str) -> float | None:
            values = [row[name] for row in rows if row.get(name) is not None]
            return median(values) if values else None

        return self._row("measured", "")._replace(
            step_seconds=typical("step_seconds"),
            tokens_per_second=typical("tokens_per_second"),
            mfu=typical("mfu"),
            bubble=typical("bubble_measured"),
            peak_bytes=max(row.get("peak_bytes") or 0 for row in rows) or None,
        )


def standing_text(ranks: list[dict[str, Any]]) -> str:
    """Where the ranks that have been silent the longest stood, such as 'rank 1 stood at 1F0 of step 3 (hung)'."""
    late = sorted(ranks, key=lambda rank: -(rank["heartbeat_age_seconds"] or 0.0))
    texts = []
    for rank in late[:MOST_RANKS]:
        where = rank["instruction"] or "no instruction"
        texts.append(f"rank {rank['rank']} stood at {where} of step {rank['step']} ({rank['state']})")
    return ", ".join(texts) or "no rank had started"


def sessions_below(process: int) -> set[int]:
    """The sessions of a process and its descendants, as far as they can still be found."""
    from pentad.orchestrator.cluster.ray_head import psutil  # imports ray

    found = set[int]()
    with suppress(psutil.Error):
        for each in [psutil.Process(process), *psutil.Process(process).children(recursive=True)]:
            with suppress(OSError):
                found.add(os.getsid(each.pid))
    return found
