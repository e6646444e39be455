"""Runs on real nodes whose slow rank moves to another node end with the bits of a run without one."""

from __future__ import annotations

import pytest
from elastic_cases import Start, assert_recovered, assert_same, outcome
from multinode import Cluster
from slow_runner import COMMAND

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 80
PAIR = ("mesh.dp=2", "mesh.pp=1", "schedule.name=1f1b", "schedule.microbatches=2", f"run.steps={STEPS}", "eval.every=0")


@pytest.mark.parametrize("mesh", [PAIR, (*PAIR, "zero.stage=1")])
def test_a_slow_rank_moves_to_another_node(nodes: Cluster, start_run: Start, mesh: tuple[str, ...]) -> None:
    nodes.resize(2, 1)
    usual = start_run(*mesh, "elastic.slow_rank=report")
    assert usual.end() == 0, usual.describe()
    run = start_run(*mesh, "elastic.slow_rank=evict", command=COMMAND)
    assert_recovered(run, "checkpoint" if "zero.stage=1" in mesh else "repair")
    (event,) = run.events("evicted")
    assert event["ranks"] == [1] and event["excess"] >= 0.08 and event["target"] != event["node"], run.describe()
    (recovered,) = run.events("recovered")
    assert recovered["steps_replayed"] == 0 and recovered["step"] == event["step"]
    assert_same(run, outcome(usual, STEPS), STEPS)
    assert nodes.free_cpus() == 3


def test_a_slow_rank_without_another_node_stays(nodes: Cluster, start_run: Start) -> None:
    nodes.resize(2)
    run = start_run(*PAIR, "elastic.slow_rank=evict", "elastic.wait_seconds=1", command=COMMAND)
    assert run.end() == 0, run.describe()
    (event,) = run.events("not evicted")
    assert "no other node had room" in event["cause"] and run.printed.read_text().count("it stays where it is") == 1
    assert [row["step"] for row in run.rows()] == list(range(STEPS)) and not run.events("lost")
    assert nodes.free_cpus() == 2
