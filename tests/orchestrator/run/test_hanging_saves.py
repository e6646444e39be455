"""Runs on real ranks, one of which hangs while it writes its part of a checkpoint."""

from __future__ import annotations

import pytest
from elastic_cases import PAIR, Start
from hanging_writer import COMMAND, STEP
from multinode import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_all_steps_run_and_the_end_says_what_was_not_saved(nodes: Cluster, start_run: Start, optimizer: str) -> None:
    """On the host, the optimizer state is written in place, and the next update waits for that."""
    nodes.resize(2)
    words = f"memory.optimizer={optimizer}", f"checkpoint.every={STEP}", "checkpoint.hang_seconds=3", "run.steps=16"
    run = start_run(*PAIR, *words, command=COMMAND)
    assert run.end() == 1, run.describe()
    assert [row["step"] for row in run.rows()] == list(range(16)) and not run.events("lost"), run.describe()
    assert [row["step"] for row in run.events("checkpoint failed")] == [STEP, 2 * STEP, 3 * STEP]
    assert "the last state, after step 16, was not saved" in run.printed.read_text().replace("\n", " ")
    assert not [*run.folder.glob("checkpoints/*/manifest.json")]
