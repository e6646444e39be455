"""A run without replicas recovers from copies in the memory of ranks, to the bits of a run without a fault.

Real ranks on a Ray cluster of several nodes on this machine, without a checkpoint before the last step. The default
suite has the same in `tests/workers/replication` and `tests/orchestrator/recovery`.
"""

from __future__ import annotations

import signal

import pytest
from elastic_cases import (
    CONTEXT,
    CUT,
    EXPERT_PIPE,
    LINE,
    PAIR,
    SQUARE,
    STEPS,
    TENSOR_PIPE,
    assert_recovered,
    assert_same,
)
from multinode import kill

COPIES = ("elastic.replicate_every=3", "checkpoint.every_seconds=0")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.mark.parametrize(
    ("schedule", "mesh", "ranks", "how"),
    [
        ("1f1b", CUT, (3,), signal.SIGKILL),
        ("1f1b", CUT, (2,), signal.SIGSTOP),
        ("1f1b", (*SQUARE, "zero.stage=1"), (1,), signal.SIGKILL),
        ("1f1b", TENSOR_PIPE, (1,), signal.SIGKILL),
        ("1f1b", (*CONTEXT, "zero.stage=3"), (3,), signal.SIGKILL),
        ("1f1b", EXPERT_PIPE, (1,), signal.SIGKILL),
        ("zb-h2", LINE, (2,), signal.SIGKILL),
        ("zb-h2", PAIR, (1,), signal.SIGKILL),
    ],
)
def test_a_rank_whose_state_only_memory_has_is_replaced_to_the_same_bits(
    nodes, start_run, reference, schedule, mesh, ranks, how
):
    expected = reference(*mesh, f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*mesh, f"schedule.name={schedule}", *COPIES)
    run.wait_for_step(8)
    run.signal_ranks(*ranks, how=how)
    assert_recovered(run, "copies")
    (recovered,) = run.events("recovered")
    assert recovered["step"] > 0 and not [row for row in run.events("checkpoint") if row["step"] < STEPS]
    assert_same(run, expected)


def test_a_lost_node_is_replaced_from_the_memory_of_another_one(nodes, start_run, reference):
    expected = reference(*CUT, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*CUT, "schedule.name=1f1b", *COPIES)
    run.wait_for_step(8)
    kill(nodes.node_of(run.pids()[0]))
    assert_recovered(run, "copies")
    assert_same(run, expected)


def test_all_nodes_of_a_lost_rack_are_replaced_from_the_memory_of_another_one(nodes, start_run, reference):
    expected = reference(*LINE, "schedule.name=1f1b")
    nodes.resize()
    racks = {rack: {"rack": rack} for rack in "ABC"}
    nodes.resize(*[1] * 6, labels=[racks[rack] for rack in "ABCABC"])
    run = start_run(*LINE, "schedule.name=1f1b", *COPIES, "elastic.failure_domain=rack", "elastic.wait_seconds=60")
    run.wait_for_step(8)
    of_rank = [nodes.node_of(pid) for pid in run.pids()]
    rack = [nodes.nodes.index(node) % 3 for node in of_rank]
    assert all(rack[rank] != rack[holder] for rank, holder in enumerate(run.events("copies")[0]["holders"]))
    lost = max(rack, key=rack.count)
    assert rack.count(lost) == 2
    for rank, its in enumerate(rack):
        if its == lost:
            kill(of_rank[rank])
    assert_recovered(run, "copies")
    assert_same(run, expected)


def test_a_rank_and_its_holder_lost_at_once_go_back_to_the_disk(nodes, start_run, reference):
    expected = reference(*CUT, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*CUT, "schedule.name=1f1b", "elastic.replicate_every=3", "checkpoint.every=10")
    run.wait_for_checkpoint(10)
    run.wait_for(lambda: run.events("copies"))
    first = run.events("copies")[0]
    run.signal_ranks(0, first["holders"][0])
    assert_recovered(run, "checkpoint")
    assert run.events("copies lost")
    assert_same(run, expected)


@pytest.mark.parametrize(("mesh", "how"), [(CUT, "copies"), (SQUARE, "repair")])
def test_a_rank_that_receives_sigterm_hands_its_state_over(nodes, start_run, reference, mesh, how):
    expected = reference(*mesh, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*mesh, "schedule.name=1f1b", *COPIES)
    run.wait_for_step(8)
    run.signal_ranks(3, how=signal.SIGTERM)
    assert_recovered(run, how)
    assert run.events("recovered")[0]["steps_replayed"] == 0
    assert {(row["rank"], row["fault"], row["detector"]) for row in run.events("lost")} == {(3, "terminated", "notice")}
    assert not [row for row in run.events("checkpoint") if row["step"] < STEPS]
    assert_same(run, expected)
