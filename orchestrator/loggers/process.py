"""The process of one logger, which reads messages from its standard input until that ends.

A library that prints, hangs or crashes thus harms only its logger. If the driver dies, its end of the pipe closes, and
everything that it has sent is still logged.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pentad.orchestrator.loggers.logger import LoggedRun, Logger, Note, evaluation_scalars, scalars

EVALUATIONS, METRICS = "eval.jsonl", "metrics.jsonl"
LOGGERS = {
    "csv": "pentad.orchestrator.loggers.csv_file:CsvFile",
    "tensorboard": "pentad.orchestrator.loggers.tensorboard:TensorBoard",
    "wandb": "pentad.orchestrator.loggers.wandb:Wandb",
    "mlflow": "pentad.orchestrator.loggers.mlflow:Mlflow",
}


def serve(kind: str, messages: Iterable[dict[str, Any]], note: Note) -> None:
    """Creates a logger from the first message, a LoggedRun, and passes the other messages to it."""
    remaining = iter(messages)
    run = LoggedRun(**next(remaining))
    logger: Logger = pkgutil.resolve_name(LOGGERS[kind])(run, note)
    end = "failed"  # a driver that dies sends no state
    evaluated = _recorded_again(logger, run)
    for message in remaining:
        match message:
            case {"row": row}:
                logger.log(row["step"], row["time"], scalars(row))
            case {"evaluation": rows}:
                if rows[0]["step"] > evaluated:  # the driver may have recorded it before this process read the file
                    evaluated = _log_evaluation(logger, rows)
            case {"rewind": step}:
                logger.rewind(step)
                # The evaluation before step `step`, the next one, still counts and is logged again.
                evaluated = _log_evaluation(logger, [row for row in _lines(run, EVALUATIONS) if row["step"] == step])
            case {"checkpoint": folder, "step": step}:
                logger.checkpoint(step, folder)
            case {"end": state}:
                end = state
    logger.close(end)


def _recorded_again(logger: Logger, run: LoggedRun) -> int:
    """Logs steps that a former driver recorded in the run's folder but may not have logged before it died. Returns the
    step of the last evaluation among them, -1 without any."""
    evaluations = [row for row in _lines(run, EVALUATIONS) if run.first <= row["step"] <= run.done]
    rows = [row for row in _lines(run, METRICS) if run.first <= row["step"] < run.done] if run.first < run.done else []
    evaluated = {step: [*of_step] for step, of_step in groupby(evaluations, itemgetter("step"))}
    trained = {row["step"]: row for row in rows}
    for step in sorted({*evaluated, *trained}):
        _log_evaluation(logger, evaluated.get(step, []))
        if row := trained.get(step):
            logger.log(step, row["time"], scalars(row))
    return max(evaluated, default=-1)


def _log_evaluation(logger: Logger, rows: list[dict[str, Any]]) -> int:
    """Logs the rows of one evaluation and returns its step; -1 if there are none."""
    if not rows:
        return -1
    logger.log(rows[0]["step"], rows[0]["time"], evaluation_scalars(rows))
    return int(rows[0]["step"])


def _lines(run: LoggedRun, name: str) -> list[dict[str, Any]]:
    """The complete lines of a file in the run's folder."""
    path = Path(run.folder, name)
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def main(kind: str) -> None:
    """Serves a logger. Standard output carries notes to the driver; what libraries print goes to standard error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the driver, which will close the pipe
        signal.signal(number, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # no logger needs it, and importing it takes a second
    notes = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def note(text: str) -> None:
        notes.write(f"{text}\n")

    def fail(error: BaseException) -> None:
        """Ends the process at once: if a library's writer thread has died, all other threads may block."""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        note(f"logger {kind} has failed and logs nothing more ({reason})")
        with suppress(OSError):  # the disk may be full
            traceback.print_exception(error)
            sys.stderr.flush()
        os._exit(1)

    threading.excepthook = lambda hooked: fail(hooked.exc_value or SystemExit())
    try:
        serve(kind, map(json.loads, sys.stdin), note)
    except Exception as error:
        fail(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
