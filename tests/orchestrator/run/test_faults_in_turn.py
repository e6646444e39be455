"""The recovery of the default suite: one run on Ray loses ranks in different ways, and then its driver.

The tests marked slow of test_elastic.py take one fault each, on several nodes and meshes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from elastic_cases import SMALL, SQUARE, Start, assert_ends_as_expected, started
from multinode import Run, multinode_cluster
from worker_processes import WorkerProcess, without_a_driver

from pentad.orchestrator.config.config import load
from pentad.orchestrator.control.control_client import connect
from pentad.orchestrator.planning.planning import make_plan

STEPS = 29
FAULTS = (((2,), signal.SIGSTOP), ((0, 3), signal.SIGKILL))


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Start]:
    """Starts runs on a single node."""
    with multinode_cluster(room=4) as cluster, started(cluster, tmp_path) as do:
        yield do


def has_recovered(run: Run, times: int) -> bool:
    return len(run.events("recovered")) == times


@pytest.mark.timeout(300)
def test_a_run_that_loses_ranks_and_then_its_driver_is_bit_identical(
    workers: list[WorkerProcess], start_run: Start
) -> None:
    overrides = (*SQUARE, "schedule.name=1f1b", "model.layers=2", "checkpoint.every=10", f"run.steps={STEPS}")
    expected = without_a_driver(workers, make_plan(load(None, [*SMALL, *overrides]), "cpu"), STEPS)
    run = start_run(*overrides)
    for number, (ranks, how) in enumerate(FAULTS):
        run.wait_for_step(3 + 4 * number)
        run.wait_for_step_since_recovery()  # the first step after one may take cluster.start_timeout_seconds
        before = len(run.events("lost"))
        with connect(run.folder) as client:
            pids = {rank["rank"]: rank["pid"] for rank in client.status()["ranks"]}
        for rank in ranks:
            os.kill(pids[rank], how)
        run.wait_for(partial(has_recovered, run, number + 1))
        assert {row["rank"] for row in run.events("lost")[before:]} >= set(ranks)
    run.wait_for_step(11)
    run.stop()  # SIGKILL
    assert_ends_as_expected(run, overrides, expected, STEPS)
    assert [row["how"] for row in run.events("recovered")] == ["repair", "repair", "adopt"], run.describe()
