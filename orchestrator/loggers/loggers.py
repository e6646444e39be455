"""The driver's side of loggers: passes a run's events on to their processes, and never waits for them.

The record of a run is metrics.jsonl. A logger that is too slow misses rows, which are counted; one that fails logs
nothing more.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.loggers.logger import LoggedRun
from pentad.orchestrator.monitoring.run_state import RunView, Watcher
from pentad.orchestrator.monitoring.runfolder import JOURNAL, RunFolder
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span

PACKAGES = {"csv": "csv", "tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
LOGS = "loggers"  # subfolder of the run's folder for what loggers print and remember
MOST_QUEUED = 10_000  # rows
CLOSE_SECONDS = 30.0


def check_loggers(kinds: Sequence[str]) -> None:
    """Raises PentadError if the package of a logger is not installed."""
    missing = [kind for kind in kinds if (spec := find_spec(PACKAGES[kind])) is None or spec.origin is None]
    if missing:
        extras = ",".join(missing)
        raise PentadError(
            f"loggers.use has {extras}: expected loggers whose packages are installed (pip install 'pentad[{extras}]')"
        )


def _newest_checkpoint(folder: RunFolder, step: int) -> int:
    """The step of the newest checkpoint recorded up to `step`, 0 if there is none. If this driver adopts the ranks of
    one that died, it is uncertain which later steps loggers have."""
    saved = (event["step"] for event in read_lines(folder.path / JOURNAL) if event["event"] == "checkpoint")
    return max((each for each in saved if each <= step), default=0)


class Loggers(Watcher):
    """All loggers of a run, from construction until `close`."""

    def __init__(self, config: RunConfig, folder: RunFolder, first: int, note: Callable[[str], None]) -> None:
        self._folder, self._state = folder, "failed"
        described, path, again = config.model_dump(), str(folder.path.absolute()), _newest_checkpoint(folder, first)
        runs = {
            kind: LoggedRun(config.run.name, path, again, first, described, config.loggers.settings(kind))
            for kind in config.loggers.use
        }
        self._processes = [process for kind, run in runs.items() if (process := _started(kind, run, note))]

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        for process in self._processes:
            for row in rows:
                process.offer({"row": row})

    def on_evaluation(self, rows: Sequence[dict[str, Any]], spans: tuple[Span, ...]) -> None:
        for process in self._processes:
            process.offer({"evaluation": list(rows)})

    def on_rewind(self, step: int) -> None:
        self._send({"rewind": step})

    def on_event(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "checkpoint":
            self._send({"checkpoint": str(self._folder.checkpoint(entry["step"])), "step": entry["step"]})

    def on_view(self, view: RunView) -> None:
        self._state = view.state

    def close(self) -> None:
        """Waits until everything is logged, but no longer than CLOSE_SECONDS."""
        self._send({"end": self._state})
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.finish()
        for process in self._processes:
            process.join(deadline)

    def _send(self, message: dict[str, Any]) -> None:
        for process in self._processes:
            process.send(message)


def _started(kind: str, run: LoggedRun, note: Callable[[str], None]) -> LoggerProcess | None:
    """Starts a logger; None, with a note, if the system refuses because of a full disk or too many processes."""
    try:
        return LoggerProcess(kind, run, note)
    except OSError as error:
        note(f"logger {kind} cannot start and logs nothing ({error})")
        return None


class LoggerProcess:
    """One logger, its queue, and the threads that write to its process and read its notes."""

    def __init__(self, kind: str, run: LoggedRun, note: Callable[[str], None]) -> None:
        self.kind, self.note, self.rows, self.dropped, self.ended = kind, note, 0, 0, False
        self.log = Path(run.folder, LOGS, f"{kind}.log")
        self.queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pentad.orchestrator.loggers.process", kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # no Ctrl-C
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.send(run._asdict())
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read)]
        for thread in self.threads:
            thread.start()

    def offer(self, message: dict[str, Any]) -> None:
        """Sends a message, or drops it if the logger is too far behind."""
        self.rows += 1
        if self.queue.qsize() < MOST_QUEUED:
            self.send(message)
        else:
            self.dropped += 1

    def send(self, message: dict[str, Any]) -> None:
        self.queue.put(message)

    def finish(self) -> None:
        """Tells the logger that nothing more will be sent."""
        self.queue.put(None)

    def join(self, deadline: float) -> None:
        """Waits for the process to end, and kills it at the monotonic second `deadline`."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.ended = True
            self.process.kill()
            self.note(f"logger {self.kind} did not finish in {CLOSE_SECONDS:g} s and was ended; see {self.log}")
        for thread in self.threads:
            thread.join(1.0)
        if self.dropped:
            text = f"logger {self.kind} was too slow and misses {self.dropped} of {self.rows} rows"
            self.note(f"{text}; metrics.jsonl has all")

    def _write(self) -> None:
        assert self.process.stdin is not None
        while (message := self.queue.get()) is not None:
            with suppress(OSError):  # the process has ended and has said why
                self.process.stdin.write(json.dumps(message) + "\n")
                self.process.stdin.flush()
        with suppress(OSError):
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.note(line.strip())
        if self.process.wait() < 0 and not self.ended:
            self.note(f"logger {self.kind} was killed and logs nothing more; see {self.log}")
