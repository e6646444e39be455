"""A rank is lost while a spare waits, and while none does: the same bits, and the seconds of each phase."""

from __future__ import annotations

import os
import signal

import pytest
from elastic_cases import CUT, SQUARE, Reference, Start, assert_recovered, assert_same
from multinode import Cluster, Run

from pentad.orchestrator.control.control_client import connect

pytestmark = pytest.mark.slow


def waits(run: Run, count: int) -> bool:
    with connect(run.folder) as client:
        return bool(client.status(30)["spares"] == count)


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        ((*SQUARE, "schedule.name=1f1b"), "repair"),
        ((*CUT, "schedule.name=1f1b", "elastic.replicate_every=3"), "copies"),
    ],
    ids=["a replica", "a copy in memory"],
)
@pytest.mark.parametrize("spares", [0, 2])
def test_a_lost_rank_is_taken_by_a_spare_with_the_same_bits(
    nodes: Cluster, start_run: Start, reference: Reference, overrides: tuple[str, ...], how: str, spares: int
) -> None:
    expected = reference(*overrides)
    nodes.resize(2, 2)
    run = start_run(*overrides, f"elastic.spares={spares}", "checkpoint.every=0")
    run.wait_for_step(6)
    with connect(run.folder) as client:
        client.request("pause", 60)
        run.wait_for(lambda: waits(run, spares))
        pid = client.status(30)["ranks"][1]["pid"]
        client.request("resume", 60)
    before = len(run.rows())
    run.wait_for_step(before + 3)
    os.kill(pid, signal.SIGKILL)
    assert_recovered(run, how)
    (recovered,) = run.events("recovered")
    print(f"spares {spares}: {recovered['seconds']}")
    assert recovered["spares"] == ([1] if spares else []), run.describe()
    assert len(run.events("spare ready")) >= spares, run.describe()
    assert_same(run, expected)
