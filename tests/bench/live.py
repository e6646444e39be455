"""A run of `pentad train` in a subprocess, observed through its run folder and its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pentad.orchestrator.control.control_client import connect
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS
from pentad.orchestrator.records.json_lines import read_lines

SPARED_RANK = 2  # no fault is injected into this rank; rank 0, which serves the store, must be hit too
POLL_SECONDS = 0.02
COMMAND = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "train")
MODEL = (
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=192", "model.vocab=300"),
    *("mesh.dp=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=4", "batch.global_batch_size=8"),
    *("batch.sequence_length=64", "cluster.device=cpu", "cluster.dashboard=false", "run.name=bench"),
)


class Ended(Exception):
    """The run ended or timed out although it should have continued."""


class LiveRun:
    """Starts a run of MODEL with `overrides`. Leaving the context kills it if it still runs."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "bench"
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, *MODEL, f"run.folder={folder}", *overrides],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},  # see `growth`
            start_new_session=True,
        )
        self.journal: list[dict[str, Any]] = []
        self.journal_offset = 0

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.output.close()

    def stop(self, seconds: float = 60.0) -> int:
        """Stops the run by SIGTERM, or kills it after `seconds`; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self.process.kill()
        return self.process.wait()

    def members(self) -> list[psutil.Process]:
        """The driver and the processes of its local cluster, which has a session of its own."""
        sessions = {self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())}
        return [process for process in psutil.process_iter() if _session(process.pid) in sessions]

    def status(self) -> dict[str, Any]:
        """The status, as from `pentad status`."""
        with connect(self.folder) as client:
            return client.status(30)

    def rank_pids(self) -> list[int]:
        """The pid of each rank when the run started."""
        return [rank["pid"] for rank in self.event("place", 60.0)["ranks"]]

    def last_step(self) -> int:
        """The last completed step, -1 before the first."""
        return self._last_row()["step"]

    def _last_row(self) -> dict[str, Any]:
        path = self.folder / METRICS
        if not path.exists():
            return {"step": -1, "generation": 0}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.endswith(b"}")]
        return json.loads(lines[-1]) if lines else {"step": -1, "generation": 0}

    def wait_steps(self, count: int, seconds: float = 90.0) -> None:
        """Waits until `count` more steps are complete."""
        first = self.last_step()
        self.wait_until(lambda: self.last_step() >= first + count, seconds)

    def wait_generation(self, generation: int, seconds: float) -> float:
        """Waits for the first step of a generation; returns the Unix time at which it completed."""
        self.wait_until(lambda: self._last_row()["generation"] >= generation, seconds)
        return time.time()

    def event(self, kind: str, seconds: float, since: float = 0.0) -> dict[str, Any]:
        """Waits for the first journal entry of this kind since the Unix time `since`."""
        self.wait_until(lambda: self.count(kind, since), seconds)
        return next(entry for entry in self.journal if entry["event"] == kind and entry["time"] >= since)

    def count(self, kind: str, since: float = 0.0) -> int:
        """The number of journal entries of this kind since the Unix time `since`."""
        path = self.folder / JOURNAL
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.journal_offset)
                complete, newline, _ = file.read().rpartition(b"\n")
            self.journal += map(json.loads, complete.splitlines())
            self.journal_offset += len(complete + newline)
        return sum(entry["event"] == kind and entry["time"] >= since for entry in self.journal)

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / METRICS)

    def has_every_step_once(self) -> bool:
        """Whether metrics.jsonl has every step once, in order."""
        steps = [row["step"] for row in self.rows()]
        return steps == list(range(len(steps)))

    def wait_until(self, condition: Callable[[], object], seconds: float) -> None:
        """Raises Ended if the run ends or `seconds` pass before the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            status = self.process.poll()
            if status is not None or time.monotonic() > deadline:
                self.output.seek(0)
                reason = f"timed out after {seconds:.0f} s" if status is None else f"exit status {status}"
                raise Ended(f"{reason}: {self.output.read()[-2000:]}")
            time.sleep(POLL_SECONDS)


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return -1
