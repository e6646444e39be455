"""Predicts steps that were measured, with the table of `pentad calibrate` and without it.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/calibration.py --measure cuda --table TABLE --json OUT

RUNS is a file of tests/bench/meshes.py. With --measure the table is made first, and otherwise read.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import stamp, write

from pentad.orchestrator.calibration.calibrate import calibrate
from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.rate_table import write_table
from pentad.orchestrator.planning.estimate import memories, simulated_seconds
from pentad.orchestrator.planning.planning import make_plan

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "tests" / "bench" / "results" / "twelve-meshes-2xh200.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=["cpu", "cuda"], help="measure this machine first")
    parser.add_argument("--table", type=Path, required=True, help="the table to write, or without --measure to read")
    parser.add_argument("--runs", type=Path, default=MEASURED, help="the measured runs")
    parser.add_argument("--json", type=Path, help="file of the results")
    given = parser.parse_args()
    found: dict[str, Any] = stamp()
    if given.measure:
        found["calibration_seconds"] = measure(given.measure, given.table)
    found["runs"] = [predicted(run, given.table) for run in json.loads(given.runs.read_text())["runs"]]
    for key in ("assumed", "calibrated"):
        errors = sorted(abs(row[f"{key}_over_measured"] - 1) for row in found["runs"])
        found[f"{key}_errors"] = {"median": errors[len(errors) // 2], "max": errors[-1]}
        print(key, found[f"{key}_errors"], flush=True)
    write(given.json, found | {"table": json.loads(given.table.read_text())})


def measure(device: str, path: Path) -> float:
    """Calibrates; returns the seconds that it took."""
    began = time.monotonic()
    table = calibrate(load(None, [f"cluster.device={device}", "mesh.pp=2"]), progress)
    write_table(table, path)
    seconds = round(time.monotonic() - began, 1)
    print(f"calibrated {table.gpu} in {seconds} s", flush=True)
    return seconds


@contextmanager
def progress() -> Any:
    began = time.monotonic()
    yield lambda done, total: print(f"{done}/{total} {time.monotonic() - began:.1f} s", flush=True)


def predicted(run: dict[str, Any], table: Path) -> dict[str, Any]:
    """Predicted seconds of a run's step and GiB of its fullest rank, with the table and without, beside the measured
    ones."""
    row = {key: run[key] for key in ("config", "overrides", "mesh", "schedule", "zero", "step_seconds", "peak_gib")}
    device = "cpu" if json.loads(table.read_text())["gpu"] == "CPU" else "cuda"
    for key, rates in (("assumed", "builtin"), ("calibrated", table)):
        plan = make_plan(load(ROOT / run["config"], [*run["overrides"], f"cluster.rates={rates}"]), device)
        row[f"{key}_over_measured"] = round(simulated_seconds(plan) / run["step_seconds"], 4)
        planned = max(each["total"] for each in memories(plan)) / 2**30
        row["planned_over_peak"] = round(planned / run["peak_gib"], 4)
    print(json.dumps({key: row[key] for key in row if key not in ("config", "overrides")}), flush=True)
    return row


if __name__ == "__main__":
    main()
