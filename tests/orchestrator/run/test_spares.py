"""Ranks are lost with and without spares waiting: the same bits, and the seconds of each phase."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from elastic_cases import CUT, SQUARE, Reference, Start, assert_recovered, assert_same
from multinode import Cluster, Run, kill

from pentad.orchestrator.control.control_client import connect

pytestmark = pytest.mark.slow


def waits(run: Run, count: int) -> bool:
    with connect(run.folder) as client:
        return bool(client.status(30)["spares"] == count)


def has_recovered(run: Run, times: int) -> bool:
    return len(run.events("recovered")) == times


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


def test_the_ranks_of_a_lost_node_are_spares_of_the_free_one_with_the_same_bits(
    nodes: Cluster, start_run: Start, reference: Reference
) -> None:
    """Twice: the second lost node has ranks that were spares before, and a new node has spares by then."""
    overrides = (*SQUARE, "schedule.name=1f1b")
    expected = reference(*overrides)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides, "elastic.spares=null", "checkpoint.every=0")
    for number in (1, 2):
        run.wait_for_step(6 * number)
        with connect(run.folder) as client:
            client.request("pause", 60)
            nodes.resize(2, 2, 2)
            run.wait_for(lambda: waits(run, 2))
            client.request("resume", 60)
            pid = client.status(30)["ranks"][1]["pid"]
        before = len(run.rows())
        run.wait_for_step(before + 3)
        kill(nodes.node_of(pid))
        run.wait_for(partial(has_recovered, run, number))
    assert_recovered(run, "repair", "repair")
    taken = [row["spares"] for row in run.events("recovered")]
    print([row["seconds"] for row in run.events("recovered")])
    assert [len(its) for its in taken] == [2, 2] and taken[0] == taken[1], run.describe()
    assert {row["detector"] for row in run.events("lost")} <= {"peer", "ray"}, run.describe()
    assert_same(run, expected)


def test_a_rank_that_stands_still_for_two_seconds_is_not_lost_with_another_one(
    nodes: Cluster, start_run: Start, reference: Reference
) -> None:
    """A busy machine may starve a process for that long."""
    overrides = (*SQUARE, "schedule.name=1f1b")
    expected = reference(*overrides)
    nodes.resize(2, 2)
    run = start_run(*overrides, "checkpoint.every=0")
    run.wait_for_step(6)
    stopped, killed = run.pids()[1], run.pids()[2]
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    time.sleep(2.0)
    os.kill(stopped, signal.SIGCONT)
    assert_recovered(run, "repair")
    assert [row["rank"] for row in run.events("lost")] == [2], run.describe()
    assert_same(run, expected)
