"""Measures what a row of metrics costs the driver and each logger, in CPU time.

PYTHONPATH=.typings:tests/bench python tests/bench/loggers.py --json OUT

`driver_loop_us` is the time of the driver's main thread, `driver_us` that of the whole driver process, and `logger_us`
that of the logger's process; `start_seconds` is what its start costs that process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

from pentad.orchestrator.loggers.logger import LoggedRun
from pentad.orchestrator.loggers.loggers import LoggerProcess

SETTINGS = {
    "csv": {},
    "tensorboard": {},
    "wandb": {"project": "bench", "entity": None, "mode": "offline"},
    "mlflow": {"tracking_uri": None, "experiment": "bench"},
}
ROW = {
    **{"step": 0, "time": 1e9, "loss": 8.2, "grad_norm": 1.2, "lr": 0.003, "tokens": 2048, "total_tokens": 123456},
    **{"step_seconds": 0.25, "tokens_per_second": 8000.0, "mfu": 0.4, "bubble_planned": 0.11, "bubble_measured": 0.13},
    **{"generation": 1, "skipped": False, "peak_bytes": 0, "host_seconds": 0.1},
}


def logged(kind: str, rows: int) -> tuple[float, float, float]:
    """CPU seconds of the driver's thread, its process, and the logger's process, for a run of this many rows."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trial").mkdir()
        run = LoggedRun("trial", f"{folder}/trial", 0, 0, {}, SETTINGS[kind])
        process, loop, whole = LoggerProcess(kind, run, print), 0.0, time.process_time()
        for step in range(rows):
            began = time.thread_time()
            process.offer({"row": {**ROW, "step": step}})
            loop += time.thread_time() - began
        process.finish()
        process.join(time.monotonic() + 60)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = now.ru_utime + now.ru_stime - children.ru_utime - children.ru_stime
    return loop, time.process_time() - whole, spent


def measure(rows: int) -> dict[str, Any]:
    found = {}
    for kind in SETTINGS:
        few, many = logged(kind, 10), logged(kind, rows + 10)
        loop, whole, logger = (1e6 * (after - before) / rows for before, after in zip(few, many, strict=True))
        found[kind] = {"driver_loop_us": loop, "driver_us": whole, "logger_us": logger, "start_seconds": few[2]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record(args.json, "loggers", lambda: measure(args.rows))


if __name__ == "__main__":
    main()
