"""The planner against measurements on H200s: peak memory per rank and seconds per step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from paths import TESTS

from pentad.orchestrator.activations import activation_memory, activation_peaks
from pentad.orchestrator.activations.allocations import Allocation, Piece
from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.table import ASSUMED_GPU
from pentad.orchestrator.planning import numerics
from pentad.orchestrator.planning.estimate import costs_of, memories, step_seconds
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

RESULTS = [json.loads(path.read_text()) for path in sorted((TESTS / "bench" / "results").glob("meshes-*.json"))]
UNITS_SINCE = "2026-11-23"  # before, stages were not split into units
HALVES_SINCE = "2026-11-29"  # before, master weights did not share the upper halves with bfloat16 weights
SPARSE_SINCE = "2026-11-29 22:00"  # before, W of the embedding filled a gradient of all its rows
COPIES_SINCE = "2026-11-26 18:12"  # before, and in the old tree, tensor ranks exchanged rows by NCCL
RUNS = [
    {
        **run,
        "has_units": call["date"] >= UNITS_SINCE,
        "has_halves": call["date"] >= HALVES_SINCE,
        "is_sparse": call["date"] >= SPARSE_SINCE,
        "has_frontend": call.get("cudnn_frontend", False),
        "copies_rows": call["date"] >= COPIES_SINCE and "OUT/old" not in call["command"],
    }
    for each in RESULTS
    for call in each["calls"]
    for run in call["runs"]
    if "peak_gib" in run
]


each_run = pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: f"{Path(run['config']).stem}-{run['mesh'].replace(' ', '')}"
)


def planned(run: dict[str, Any]) -> Plan:
    """The plan of a measured run. The buckets of some runs took no memory; no run used CUDA graphs."""
    overrides = [each for each in run["overrides"] if not each.startswith("zero.bucket_mib")]
    overrides += ["cluster.cuda_graphs=false"]
    overrides += [] if run["has_units"] else ["memory.unit_layers=100"]
    overrides += [f"cluster.gpu={ASSUMED_GPU}"] if run["has_frontend"] else []
    with patch.object(numerics, "has_cudnn_frontend", lambda: run["has_frontend"]):
        plan = make_plan(load(TESTS.parent / run["config"], overrides), "cuda")
    assert str(plan.mesh) == run["mesh"]
    return plan


@pytest.fixture
def dense_embedding_gradients(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans dense gradients of the embedding for runs in which its W filled them."""
    if not run["is_sparse"]:
        lookup = activation_memory.lookup

        def with_all_rows(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
            yield from lookup(model, piece)
            rows = model.vocab // piece.mesh.tp + piece.tokens * (piece.wide > piece.itemsize)
            yield Allocation("gradient of all rows", "W", rows * model.hidden * piece.wide)

        monkeypatch.setattr(activation_memory, "lookup", with_all_rows)
    activation_peaks._stage.cache_clear()
    yield
    activation_peaks._stage.cache_clear()


@pytest.mark.usefixtures("dense_embedding_gradients")
@each_run
def test_peak_memory_is_as_planned(run: dict[str, Any]) -> None:
    """Within 2 %, or 5 % for early runs."""
    most = max(each["total"] + (0 if run["has_halves"] else each["master"]) for each in memories(planned(run)))
    assert most / 2**30 == pytest.approx(run["peak_gib"], rel=0.02 if run["has_halves"] else 0.05)


@each_run
def test_step_seconds_are_within_20_percent(run: dict[str, Any]) -> None:
    """The assumed rates were fitted to these runs."""
    plan, rates = planned(run), rates_of("cuda", ASSUMED_GPU)
    rates = rates if run["copies_rows"] else replace(rates, peer_issue=rates.issue)
    assert step_seconds(simulate(plan.program, costs_of(plan, rates))) == pytest.approx(run["step_seconds"], rel=0.2)
