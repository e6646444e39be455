"""`pentad sweep`: runs trials in parallel on free devices, and keeps a row for each in the sweep's folder.

Trials with a row in the folder are not run again, so the same command resumes a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pentad.orchestrator.records.run_files import replace_file
from pentad.orchestrator.records.run_lock import locked
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.sweep.free_devices import FreeDevices
from pentad.orchestrator.sweep.page import page_of
from pentad.orchestrator.sweep.results import TrialRow, merged, read_rows, writable, write_rows
from pentad.orchestrator.sweep.running import RunningTrial
from pentad.orchestrator.sweep.trials import Trial

PAGE, RUNS, LOGS = "sweep.html", "runs", "logs"
POLL_SECONDS = 0.2


class Running(Protocol):
    """A trial under way on its `devices`."""

    devices: tuple[str, ...]

    def poll(self) -> TrialRow | None: ...
    def end(self) -> None: ...


Start = Callable[[Trial, FreeDevices, tuple[str, ...]], Running]


@dataclass(frozen=True)
class SweepProgress:
    """How many trials of this call have a row, and how many are running; and the newest row, if there is a new one."""

    done: int
    running: int
    row: TrialRow | None = None


Report = Callable[[SweepProgress], object]


@dataclass(frozen=True)
class Sweep:
    """The rows of this call's trials, in their order; `ran` of them ran in this call."""

    rows: list[TrialRow]
    ran: int


def sweep(
    trials: Sequence[Trial],
    free: FreeDevices,
    folder: Path,
    title: str,
    deadline: float,
    report: Report,
    *,
    retry: bool = False,
    start: Start | None = None,
) -> Sweep:
    """Runs the trials that have no row in `folder` yet; with `retry` also those that were not measured. Each is ended
    after `deadline` seconds.

    On Ctrl-C, SIGTERM or SIGHUP, running trials are ended without a row and KeyboardInterrupt is raised. Raises
    PentadError if another sweep has locked the folder, or it cannot be written.
    """
    logs = folder / LOGS
    with writable(folder):
        for path in (folder / RUNS, logs):
            path.mkdir(parents=True, exist_ok=True)
    held = f"--out is '{folder}', where process {{holder}} is running a sweep: expected another folder"
    with locked(folder, held), Interrupts():
        known = read_rows(folder)
        settled = {row.trial for row in known if row.outcome == "measured" or not (retry or row.outcome == "pruned")}
        rows, order = known, {trial.name: number for number, trial in enumerate(trials)}

        def record(*new: TrialRow) -> None:
            nonlocal rows
            rows = sorted(merged(rows, new), key=lambda row: order.get(row.trial, -1))
            write_rows(folder, rows)
            with writable(folder):
                replace_file(folder / PAGE, page_of(rows, title).encode())

        record(*(trial.row for trial in trials if trial.config is None))
        waiting = [trial for trial in trials if trial.config is not None and trial.name not in settled]
        begin = start or (lambda trial, free, devices: RunningTrial(trial, free, devices, deadline, logs))
        ran = len(waiting)
        run_trials(waiting, free, begin, record, report, done=len(trials) - ran)
        by_trial = {row.trial: row for row in rows}
        return Sweep([by_trial[trial.name] for trial in trials], ran)


def run_trials(
    trials: Sequence[Trial],
    free: FreeDevices,
    start: Start,
    record: Callable[[TrialRow], object],
    report: Report,
    *,
    done: int = 0,
) -> None:
    """Starts each trial, in order, as soon as enough devices are free. Ends all trials, whatever is raised."""
    waiting, running = list(trials), list[Running]()
    try:
        while waiting or running:
            for trial in list(waiting):
                if (devices := free.take(trial.row.ranks or 1)) is not None:
                    waiting.remove(trial)
                    running.append(start(trial, free, devices))
            report(SweepProgress(done, len(running)))
            time.sleep(POLL_SECONDS)
            for each in list(running):
                if (row := each.poll()) is not None:
                    running.remove(each)
                    free.give_back(each.devices)
                    record(row)
                    done += 1
                    report(SweepProgress(done, len(running), row))
    finally:
        for each in running:
            each.end()
