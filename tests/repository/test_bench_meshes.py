"""Measured models do train: weights that stay zero would be multiplied faster, and the loss would not change."""

from itertools import pairwise
from pathlib import Path

import pytest
from meshes import measure, train
from pool import process_context
from ranks import Ranks
from restored_ranks import when_restored_and_begun

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses forked ranks that have imported torch, as other tests do; the benchmark's own take seconds to import it."""
    context = process_context()
    monkeypatch.setattr("ranks.mp.get_context", lambda method: context)


@pytest.mark.timeout(100)
def test_the_loss_of_a_measured_run_falls():
    ranks = Ranks(90, train)
    overrides = ["run.steps=6", "mesh.dp=1", "mesh.pp=1", "schedule.microbatches=2"]
    row = measure(ranks, str(ROOT / "deploy" / "jobs" / "cpu.yaml"), overrides, "cpu", warmup=1)
    ranks.stop()
    assert all(after < before for before, after in pairwise(row["losses"])), row


@pytest.mark.timeout(60)
def test_the_error_of_a_rank_that_cannot_start_is_reported_at_once():
    ranks = Ranks(600, train)
    overrides = ["mesh.dp=2", "mesh.pp=1", "batch.sequence_length=131072", "schedule.microbatches=1"]
    row = measure(ranks, str(ROOT / "deploy" / "jobs" / "cpu.yaml"), overrides, "cpu")
    assert "expected at least 131073" in row["error"]
    assert not ranks.processes


@pytest.mark.timeout(100)
def test_no_rank_begins_before_all_have_their_initial_weights():
    """Ranks read weights from each other, and only the call that makes them tells when they exist."""
    ranks = Ranks(90, when_restored_and_begun)
    config = load(ROOT / "deploy" / "jobs" / "cpu.yaml", ["mesh.dp=2", "mesh.pp=1", "zero.stage=1"])
    restored, began = zip(*ranks.run(make_plan(config, "cpu")), strict=True)
    ranks.stop()
    assert min(began) >= max(restored)
