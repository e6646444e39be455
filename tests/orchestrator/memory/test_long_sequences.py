"""Planned memory of long sequences agrees with that of the steps in tests/bench/results/long-h200.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.planning import make_plan

CALLS = json.loads((ROOT / "tests" / "bench" / "results" / "long-h200.json").read_text())["calls"]
RUNS = [run for call in CALLS for run in call.get("runs", ()) if "model.layers=4" in run["overrides"]]


@pytest.mark.parametrize("run", RUNS, ids=[run["overrides"][-1] for run in RUNS])
def test_four_layers_of_131072_tokens_are_planned_within_half_a_percent(run: dict[str, Any]) -> None:
    words = [word for word in run["overrides"] if not word.startswith("data.")]
    plan = make_plan(load(ROOT / run["config"], [*words, f"cluster.gpu={run['device']}"]), "cuda")
    assert memory(plan, 0)["total"] / 2**30 == pytest.approx(run["peak_gib"], rel=5e-3)


def test_there_are_runs_with_and_without_recomputation_offloading_and_state_on_the_host() -> None:
    assert len(RUNS) == 4
