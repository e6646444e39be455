"""A run of `pentad train` in a process of its own, seen through its folder and its processes."""

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

from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS, read_lines

SPARE = 2  # the rank that no fault meets: it is not the one that serves the store
POLL_SECONDS = 0.02
COMMAND = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "train")
MODEL = (
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=192", "model.vocab=300"),
    *("mesh.dp=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=4", "batch.global_batch_size=8"),
    *("batch.sequence_length=64", "cluster.device=cpu", "cluster.dashboard=false", "run.name=bench"),
)


class Ended(Exception):
    """The run ended, or took too long, where it should have gone on."""


class LiveRun:
    """Starts with MODEL, changed by `overrides`; a `with` kills what is left of it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "bench"
        self.printed = (folder / "printed").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, *MODEL, f"run.folder={folder}", *overrides],
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.journal: list[dict[str, Any]] = []
        self.read = 0

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.printed.close()

    def stop(self, seconds: float = 60.0) -> int:
        """As Ctrl-C does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self.process.kill()
        return self.process.wait()

    def members(self) -> list[psutil.Process]:
        """The driver and the processes of its local cluster, which are a session of their own."""
        sessions = {self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())}
        return [process for process in psutil.process_iter() if _session(process.pid) in sessions]

    def ranks(self, *raylets: int) -> list[int]:
        """Pids of the ranks, the longest-lived first; below these raylets, or those of the local cluster."""
        roots = [psutil.Process(pid) for pid in raylets] or self.members()[1:]
        found = {}
        for root in roots:
            for child in root.children():
                with suppress(psutil.Error):
                    if child.cmdline()[:1][0].startswith("ray::Worker"):
                        found[child.pid] = child.create_time()
        return sorted(found, key=lambda pid: (found[pid], pid))

    def rank_pids(self) -> list[int]:
        """Of the ranks as they were placed first."""
        return [rank["pid"] for rank in self.event("place", 60.0)["ranks"]]

    def position(self) -> int:
        """The last step that is done, -1 before there is one."""
        return self._last()["step"]

    def _last(self) -> dict[str, Any]:
        path = self.folder / METRICS
        if not path.exists():
            return {"step": -1, "generation": 0}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.endswith(b"}")]
        return json.loads(lines[-1]) if lines else {"step": -1, "generation": 0}

    def wait_steps(self, count: int, seconds: float = 90.0) -> None:
        """Until that many more steps are done."""
        first = self.position()
        self.wait_until(lambda: self.position() >= first + count, seconds)

    def step_seen(self, generation: int, seconds: float) -> float:
        """When the first step of a generation was seen done: Unix time."""
        self.wait_until(lambda: self._last()["generation"] >= generation, seconds)
        return time.time()

    def event(self, kind: str, seconds: float, since: float = 0.0) -> dict[str, Any]:
        """The first entry of the journal of this kind since then."""
        self.wait_until(lambda: self.count(kind, since), seconds)
        return next(entry for entry in self.journal if entry["event"] == kind and entry["time"] >= since)

    def count(self, kind: str, since: float = 0.0) -> int:
        path = self.folder / JOURNAL
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.read)
                whole = file.read().rpartition(b"\n")[0]
            self.journal += map(json.loads, whole.splitlines())
            self.read += len(whole) + bool(whole)
        return sum(entry["event"] == kind and entry["time"] >= since for entry in self.journal)

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / METRICS)

    def is_whole(self) -> bool:
        """Whether metrics.jsonl has every step once, in order."""
        steps = [row["step"] for row in self.rows()]
        return steps == list(range(len(steps)))

    def wait_until(self, true: Callable[[], object], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not true():
            if self.process.poll() is not None or time.monotonic() > until:
                self.printed.seek(0)
                state = self.process.poll()
                raise Ended(f"{'no end in sight' if state is None else f'exit {state}'}: {self.printed.read()[-2000:]}")
            time.sleep(POLL_SECONDS)


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return -1
