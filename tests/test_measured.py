"""The planner and what was measured on GPUs: the most that a rank had allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pentad.orchestrator.config import load
from pentad.orchestrator.estimate import memories
from pentad.orchestrator.planning import make_plan

ROOT = Path(__file__).resolve().parent
RESULTS = json.loads((ROOT / "bench" / "results" / "meshes-4xh200.json").read_text())
RUNS = [run for call in RESULTS["calls"] for run in call["runs"] if "peak_gib" in run]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{Path(run['config']).stem}-{run['mesh'].replace(' ', '')}")
def test_planned_bytes_are_those_of_h200s(run: dict[str, Any]) -> None:
    plan = make_plan(load(ROOT.parent / run["config"], run["overrides"]), "cuda")
    assert str(plan.mesh) == run["mesh"]
    planned = max(each["total"] for each in memories(plan)) / 2**30
    assert planned == pytest.approx(run["peak_gib"], rel=0.01)
