"""The process of one logger: reads messages from its standard input until that ends.

A library that prints, hangs or crashes harms nothing but its logger. If the driver dies, its end of the pipe closes,
and everything that it has sent is still logged.
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
    """Creates the logger of the first message, a LoggedRun, and passes the others to it."""
    remaining = iter(messages)
    run = LoggedRun(**next(remaining))
    logger: Logger = pkgutil.resolve_name(LOGGERS[kind])(run, note)
    end = "failed"  # a driver that dies says nothing
    _recorded_again(logger, run)
    for message in remaining:
        match message:
            case {"row": row}:
                logger.log(row["step"], row["time"], scalars(row))
            case {"evaluation": rows}:
                logger.log(rows[0]["step"], rows[0]["time"], evaluation_scalars(rows))
            case {"rewind": step}:
                logger.rewind(step)
                _evaluation_again(logger, run, step)
            case {"checkpoint": folder, "step": step}:
                logger.checkpoint(step, folder)
            case {"end": state}:
                end = state
    logger.close(end)


def _recorded_again(logger: Logger, run: LoggedRun) -> None:
    """A driver that died had recorded these steps, but need not have logged them."""
    rows = {row["step"]: row for row in _lines(run, METRICS)}
    for step in range(run.first, run.done):
        _evaluation_again(logger, run, step)
        if row := rows.get(step):
            logger.log(step, row["time"], scalars(row))
    _evaluation_again(logger, run, run.done)


def _evaluation_again(logger: Logger, run: LoggedRun, step: int) -> None:
    """The evaluation after `step` steps still counts when step `step`, the next one, is logged again."""
    if found := [row for row in _lines(run, EVALUATIONS) if row["step"] == step]:
        logger.log(step, found[0]["time"], evaluation_scalars(found))


def _lines(run: LoggedRun, name: str) -> list[dict[str, Any]]:
    path = Path(run.folder, name)
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def main(kind: str) -> None:
    """Standard output carries notes to the driver; what libraries print goes to standard error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the driver, which then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # no logger needs it, and importing it takes a second
    notes = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def note(text: str) -> None:
        notes.write(f"{text}\n")

    def fail(error: BaseException) -> None:
        """Ends the process at once: a library whose writing thread has died may block all others."""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        note(f"logger {kind} has failed and logs nothing more ({reason})")
        with suppress(OSError):  # of a full disk
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
