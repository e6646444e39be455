"""Runs with adapters on Ray: stopped, resumed, with a killed rank, they have the bits of a run without a fault."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_cases import SQUARE, assert_recovered, assert_same, outcome
from multinode import Cluster, Run, multinode_cluster

SMALL = (
    *("model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64", "model.vocab=300"),
    *("batch.global_batch_size=8", "batch.sequence_length=32", "schedule.name=zb-h2", "cluster.device=cpu"),
    *("cluster.auth=disabled", "cluster.start_timeout_seconds=150", "elastic.hang_seconds=3"),
)
STEPS = 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with multinode_cluster() as cluster:
        cluster.resize(2, 2, 2)
        yield cluster


def test_a_lost_rank_and_a_resume_keep_the_bits_of_adapters(nodes: Cluster, tmp_path: Path) -> None:
    base = Run(nodes, tmp_path / "base", *SMALL, *SQUARE, "run.steps=2")
    assert base.end() == 0, base.describe()
    lora = ("lora.rank=2", "lora.targets=all-linear", f"run.init_from={base.folder}", "optimizer.decay_steps=40")
    expected_run = Run(nodes, tmp_path / "expected", *SMALL, *SQUARE, *lora, f"run.steps={STEPS}")
    assert expected_run.end() == 0, expected_run.describe()
    expected = outcome(expected_run, STEPS)
    assert all("lora_" in name or not name.startswith(("model.", "optimizer.")) for name in expected[1])

    killed = Run(nodes, tmp_path / "killed", *SMALL, *SQUARE, *lora, f"run.steps={STEPS}")
    killed.wait_for_step(4)
    killed.signal_ranks(1, how=signal.SIGKILL)
    assert_recovered(killed, "repair")
    assert_same(killed, expected, STEPS)

    stopped = Run(nodes, tmp_path / "stopped", *SMALL, *SQUARE, *lora, "run.steps=7")
    assert stopped.end() == 0, stopped.describe()
    resumed = Run(nodes, tmp_path / "stopped", *SMALL, *SQUARE, *lora, f"run.steps={STEPS}")
    assert resumed.end() == 0, resumed.describe()
    assert_same(resumed, expected, STEPS)
