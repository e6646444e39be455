"""Calibrates a machine, then predicts steps with the table and without it, beside measured ones.

PYTHONPATH=.typings:tests/support python tests/bench/calibration.py --measure cuda --table TABLE --out OUT
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
MEASURED = ROOT / "tests" / "bench" / "results" / "meshes-2xh200.json"
DENSE, SMALL = "deploy/jobs/llama-8b.yaml", "deploy/jobs/llama-1b.yaml"
EIGHT = ("model.layers=8",)
# What the file of measured runs does not have as well.
CASES = {
    "8 layers of 8B, dp2, ZeRO-1": (DENSE, *EIGHT, "mesh.tp=1", "mesh.dp=2", "zero.stage=1", "schedule.microbatches=2"),
    "8 layers of 8B, pp2, 1f1b": (DENSE, *EIGHT, "mesh.tp=1", "mesh.pp=2", "schedule.microbatches=8"),
    "8 layers of 8B, pp2, zb-h2": (
        *(DENSE, *EIGHT, "mesh.tp=1", "mesh.pp=2", "schedule.name=zb-h2", "schedule.microbatches=8"),
    ),
    "8 layers of 8B, tp2": (DENSE, *EIGHT, "mesh.tp=2"),
    "1B, dp2": (SMALL, "mesh.pp=1", "mesh.dp=2", "schedule.microbatches=2"),
    "1B, pp2": (SMALL, "mesh.pp=2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=["cpu", "cuda"], help="measure this machine first")
    parser.add_argument("--table", type=Path, required=True, help="the table to write, or without --measure to read")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    found: dict[str, Any] = {**stamp(), "table": {}, "runs": []}
    if args.measure:
        began = time.monotonic()
        table = calibrate(load(None, [f"cluster.device={args.measure}", "mesh.pp=2"]), progress)
        write_table(table, args.table)
        found["calibration_seconds"] = round(time.monotonic() - began, 1)
        print(f"calibrated {table.gpu} in {found['calibration_seconds']} s", flush=True)
    found["table"] = json.loads(args.table.read_text())
    print(json.dumps(found["table"]), flush=True)
    for name, (config, *overrides) in CASES.items():
        found["runs"].append(predicted(name, config, overrides, args.table))
    for run in measured_runs():
        name = f"{Path(run['config']).stem} {run['mesh']} {run['schedule']} ZeRO-{run['zero']}"
        row = predicted(name, run["config"], run["overrides"], args.table, run["step_seconds"], run["peak_gib"])
        found["runs"].append(row)
    for key in ("assumed", "calibrated"):
        ratios = sorted(abs(row[f"{key}_over_measured"] - 1) for row in found["runs"] if f"{key}_over_measured" in row)
        found[f"{key}_errors"] = {"median": ratios[len(ratios) // 2], "max": ratios[-1]}
        print(key, found[f"{key}_errors"], flush=True)
    write(args.out, found)


@contextmanager
def progress() -> Any:
    began = time.monotonic()
    yield lambda done, total: print(f"{done}/{total} {time.monotonic() - began:.1f} s", flush=True)


def measured_runs() -> list[dict[str, Any]]:
    """Of the newest kind: those in which stages had units."""
    calls = json.loads(MEASURED.read_text())["calls"]
    return [run for call in calls if call["date"] >= "2026-11-23" for run in call["runs"] if "peak_gib" in run]


def predicted(
    name: str, config: str, overrides: list[str], table: Path, seconds: float = 0.0, peak_gib: float = 0.0
) -> dict[str, Any]:
    """Seconds of a step and GiB of the fullest rank, with the table and without; their ratios to what was measured."""
    row: dict[str, Any] = {"name": name, "config": config, "overrides": overrides}
    device = "cpu" if json.loads(table.read_text())["gpu"] == "CPU" else "cuda"
    for key, rates in (("assumed", "builtin"), ("calibrated", table)):
        plan = make_plan(load(ROOT / config, [*overrides, f"cluster.rates={rates}"]), device)
        row[f"{key}_seconds"] = round(simulated_seconds(plan), 4)
        row["planned_gib"] = round(max(each["total"] for each in memories(plan)) / 2**30, 2)
        if seconds:
            row[f"{key}_over_measured"] = round(row[f"{key}_seconds"] / seconds, 4)
    if seconds:
        row |= {"measured_seconds": seconds, "planned_over_peak": round(row["planned_gib"] / peak_gib, 4)}
    print(json.dumps({key: value for key, value in row.items() if key not in ("config", "overrides")}), flush=True)
    return row


if __name__ == "__main__":
    main()
