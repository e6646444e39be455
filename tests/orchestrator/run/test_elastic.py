"""Elastic restart: whatever is lost, the run finishes by itself, bit-identical if its mesh was repaired.

Real ranks on a Ray cluster of several nodes on this machine. The reference is the same run without a fault.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from elastic_cases import (
    CONTEXT,
    CUT,
    EXPERTS,
    FAKE,
    GROUPS,
    LINE,
    PAIR,
    SCHEDULES,
    SQUARE,
    TENSOR,
    assert_ends_as_expected,
    assert_recovered,
    assert_same,
    outcome,
)
from multinode import kill

from pentad.orchestrator.config.config import load
from pentad.orchestrator.control.control_client import connect
from pentad.orchestrator.records.hash_chain import AUDIT, read_chain
from pentad.workers.lanes.progress_file import read_progress

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(300)


@slow
def test_resuming_from_a_checkpoint_after_a_killed_driver_is_bit_identical(nodes, start_run, reference):
    expected = reference(*PAIR, "schedule.name=zb-h2")
    nodes.resize(2, 2, 2)
    overrides = (*PAIR, "schedule.name=zb-h2", "checkpoint.every=10", "elastic.driver_lease=0")
    run = start_run(*overrides)
    run.wait_for_checkpoint(10)
    run.stop()
    again = assert_ends_as_expected(run, overrides, expected)
    assert "resuming from step" in again.printed.read_text()


@slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "rank", "how"),
    [
        ("1f1b", SQUARE, 1, signal.SIGKILL),
        ("1f1b", SQUARE, 3, signal.SIGTERM),
        ("dualpipe", LINE, 2, signal.SIGSTOP),
        ("zb-h2", SQUARE, 1, signal.SIGKILL),
        ("dualpipe", LINE, 1, signal.SIGKILL),
        ("1f1b", SQUARE, 2, signal.SIGSTOP),
        ("zb-h2", SQUARE, 2, signal.SIGSTOP),
        ("1f1b", TENSOR, 1, signal.SIGKILL),
        ("1f1b", TENSOR, 2, signal.SIGSTOP),
        ("1f1b", EXPERTS, 1, signal.SIGKILL),
        ("1f1b", EXPERTS, 2, signal.SIGSTOP),
        ("1f1b", CONTEXT, 3, signal.SIGKILL),
        ("1f1b", GROUPS, 1, signal.SIGKILL),
        ("zb-h2", GROUPS, 2, signal.SIGSTOP),
    ],
)
def test_recovery_from_a_lost_rank_is_bit_identical(nodes, start_run, reference, schedule, mesh, rank, how):
    expected = reference(*mesh, f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*mesh, f"schedule.name={schedule}")
    run.wait_for_step(4)
    run.signal_ranks(rank, how=how)
    assert_recovered(run, "repair")
    assert_same(run, expected)


@slow
@pytest.mark.parametrize(
    ("schedule", "rank", "how"),
    [("zb-h2", 1, signal.SIGKILL), ("zb-h2", 2, signal.SIGSTOP), ("dualpipe", 3, signal.SIGKILL)],
)
def test_recovery_with_post_validation_is_bit_identical(nodes, start_run, reference, schedule, rank, how):
    expected = reference(*SCHEDULES[schedule], f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*SCHEDULES[schedule], f"schedule.name={schedule}", "schedule.post_validation=true")
    run.wait_for_step(4)
    run.signal_ranks(rank, how=how)
    assert_recovered(run, "repair")
    assert_same(run, expected)
    limit = load(None, []).optimizer.clip_norm
    assert any(norm > limit for _, norm in expected[0]) and any(norm < limit for _, norm in expected[0])


@slow
@pytest.mark.parametrize("schedule", ["dualpipe", "zb-h2"])
def test_recovery_from_two_lost_ranks_whose_state_survives_elsewhere(nodes, start_run, reference, schedule):
    expected = reference(*SCHEDULES[schedule], f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*SCHEDULES[schedule], f"schedule.name={schedule}")
    run.wait_for_step(4)
    run.signal_ranks(*((0, 1) if schedule == "dualpipe" else (0, 3)))
    assert_recovered(run, "repair")
    assert {row["rank"] for row in run.events("lost")} == ({0, 1} if schedule == "dualpipe" else {0, 3})
    assert_same(run, expected)


@slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "ranks"),
    [
        ("1f1b", LINE, (1,)),
        ("dualpipe", LINE, (0, 3)),
        ("zb-h2", SQUARE, (0, 1)),
        ("1f1b", CUT, (3,)),
        ("zb-h2", SQUARE, (0, 1, 2, 3)),
        ("1f1b", ("mesh.pp=1",), (0,)),
    ],
)
def test_state_that_no_rank_has_left_comes_from_the_newest_checkpoint(
    nodes, start_run, reference, schedule, mesh, ranks
):
    expected = reference(*mesh, f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*mesh, f"schedule.name={schedule}", "checkpoint.every=10")
    run.wait_for_checkpoint(10)
    run.signal_ranks(*ranks)
    assert_recovered(run, "checkpoint")
    (recovered,) = run.events("recovered")
    assert recovered["step"] > 0 and recovered["step"] % 10 == 0
    assert recovered["steps_replayed"] >= 0
    assert_same(run, expected)


@slow
@pytest.mark.parametrize(
    ("schedule", "how"),
    [("1f1b", signal.SIGKILL), ("1f1b", signal.SIGTERM), ("zb-h2", signal.SIGKILL), ("dualpipe", signal.SIGKILL)],
)
def test_a_lost_node_is_replaced(nodes, start_run, reference, schedule, how):
    expected = reference(*SCHEDULES[schedule], f"schedule.name={schedule}")
    nodes.resize(2, 2, 2)
    run = start_run(*SCHEDULES[schedule], f"schedule.name={schedule}")
    run.wait_for_step(4)
    kill(nodes.node_of(run.pids()[0]), how)
    assert_recovered(run, "repair")
    assert_same(run, expected)


@slow
def test_a_draining_node_is_vacated_without_losing_anything(nodes, start_run, reference):
    expected = reference(*SQUARE, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b")
    run.wait_for(lambda: run.events("place"))
    draining = nodes.node_of(run.pids()[0])
    with connect(run.folder) as client:
        run.wait_for_step(4)
        client.request("pause")  # no step runs meanwhile: the driver polls for notices every two seconds
        nodes.drain(draining, 10)
        run.wait_for(lambda: run.events("lost"))
        kill(draining)
        run.wait_for(lambda: run.events("recovered"))
        client.request("resume")
    assert_recovered(run, "repair")
    assert {(row["fault"], row["detector"]) for row in run.events("lost")} == {("drain", "notice")}
    assert run.events("recovered")[0]["steps_replayed"] == 0
    assert_same(run, expected)


@slow
@pytest.mark.parametrize("moment", ["create", "fence"])
def test_a_fault_during_a_recovery(nodes, start_run, reference, moment):
    expected = reference(*SQUARE, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b")
    run.wait_for_step(4)
    run.signal_ranks(1)
    run.wait_for(lambda: run.events("fence"))
    if moment == "create":
        time.sleep(1.0)
    run.signal_ranks(2)
    assert_recovered(run, "repair")
    assert_same(run, expected)


@slow
def test_a_fault_while_a_checkpoint_is_restored(nodes, start_run, reference):
    expected = reference(*LINE, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*LINE, "schedule.name=1f1b", "checkpoint.every=10")
    run.wait_for_checkpoint(10)
    run.signal_ranks(1)
    run.wait_for(lambda: run.events("fence"))
    run.wait_for(lambda: read_progress(nodes.board(run.pids()[2])).generation == 2)  # it has released its old weights
    run.signal_ranks(2)
    assert_recovered(run, "checkpoint")
    assert_same(run, expected)


@slow
def test_a_fault_in_the_first_step(nodes, start_run, reference):
    expected = reference(*SQUARE, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b")
    run.wait_for(lambda: run.events("place"))
    board = nodes.board(run.pids()[3])
    run.wait_for(lambda: read_progress(board).counter >= 0)
    run.signal_ranks(3)
    assert_recovered(run, "repair")
    assert run.events("recovered")[0]["step"] <= 1
    assert_same(run, expected)


@slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "sizes", "small"),
    [
        ("1f1b", SQUARE, (2, 2), "pp2"),
        ("dualpipe", LINE, (2, 2), "pp2"),
        ("1f1b", LINE, (3, 1), "pp3"),
        ("1f1b", CUT, (2, 2), "pp2"),
        ("1f1b", TENSOR, (2, 2), "tp2"),
        ("1f1b", EXPERTS, (2, 2), "ep2"),
        ("1f1b", GROUPS, (2, 2), "dp2"),
    ],
)
def test_a_mesh_shrinks_and_grows_back(nodes, start_run, reference, schedule, mesh, sizes, small):
    expected = reference(*mesh, f"schedule.name={schedule}")
    nodes.resize(*sizes)
    elastic = ("checkpoint.every=10", "elastic.min_ranks=2", "elastic.wait_seconds=1", "elastic.hang_seconds=20")
    run = start_run(*mesh, f"schedule.name={schedule}", *elastic)
    run.wait_for(lambda: run.events("place"))
    lost = nodes.node_of(run.pids()[3])
    with connect(run.folder) as client:
        run.wait_for_step(12)
        kill(lost)
        run.wait_for(lambda: run.events("lost"))
        # The run is paused as soon as it has shrunk, lest it end before the nodes are there, however long they take.
        client.request("pause", 120)
        assert len(run.events("recovered")) == 1
        nodes.resize(*sizes)
        run.wait_for(lambda: len(run.events("recovered")) == 2)
        client.request("resume")
    assert_recovered(run, "shrink", "grow")
    full = {LINE: "pp4", GROUPS: "dp4"}.get(mesh, f"dp2 x {small}")
    assert [row["mesh"] for row in run.events("recovered")] == [small, full]
    actual, state = outcome(run)
    assert actual == [pytest.approx(pair, rel=1e-4) for pair in expected[0]], run.describe()
    assert state.keys() == expected[1].keys()
    assert {row["tokens"] for row in run.rows()} == {256}


@slow
def test_a_shrunk_mesh_that_loses_the_only_holder_of_a_stage_goes_back_to_the_checkpoint_that_it_left(nodes, start_run):
    """The steps since then run again, to the same bits."""
    nodes.resize(2, 2)
    elastic = ("checkpoint.every=1000", "elastic.min_ranks=2", "elastic.wait_seconds=1", "elastic.hang_seconds=20")
    run = start_run(*SQUARE, "schedule.name=1f1b", "run.steps=200", *elastic)
    run.wait_for_step(12)
    lost = nodes.node_of(run.pids()[3])
    survivor = next(pid for pid in run.pids() if nodes.node_of(pid) != lost)
    kill(lost)
    run.wait_for(lambda: run.events("checkpoint"))
    (saved,) = run.events("checkpoint")
    run.wait_for_step(saved["step"] + 4)
    os.kill(survivor, signal.SIGKILL)
    assert_recovered(run, "shrink", "checkpoint")
    shrunk, repaired = run.events("recovered")
    assert repaired["step"] == saved["step"] <= shrunk["step"] + 2 and repaired["steps_replayed"] >= 4
    outcome(run, 200)
    again: dict[int, list[float]] = {}
    for entry in read_chain((run.folder / AUDIT).read_bytes().split(b"\n")[:-1], AUDIT):
        if entry["event"] == "step" and entry["generation"] >= shrunk["generation"]:
            again.setdefault(entry["step"], []).append(entry["loss"])
    twice = [losses for losses in again.values() if len(losses) == 2]
    assert len(twice) == repaired["steps_replayed"] and all(first == second for first, second in twice)


@slow
def test_a_mesh_that_may_not_shrink_ends_the_run_with_the_reason(nodes, start_run):
    nodes.resize(2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b", "elastic.wait_seconds=1")
    run.wait_for_step(4)
    kill(nodes.node_of(run.pids()[0]))
    assert run.end() == 1
    sentence = run.printed.read_text().strip().splitlines()[-1]
    assert sentence.startswith("pentad: rank "), run.describe()
    assert "; no node with room for it joined within elastic.wait_seconds = 1, and 2 ranks make no mesh of" in sentence
    assert "elastic.min_ranks = 4 or more (more in " in sentence
    assert "Traceback" not in run.printed.read_text()
    assert run.events()[-1]["event"] == "failure"
    run.assert_gone()


@slow
def test_max_failures_zero_ends_the_run_at_the_first_fault(nodes, start_run):
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b", "elastic.max_failures=0")
    run.wait_for_step(4)
    run.signal_ranks(1)
    assert run.end() == 1
    last = run.printed.read_text().strip().splitlines()[-1]
    assert re.fullmatch(
        r"pentad: rank 1 \(dp1 pp0, .*\) died.*: its process was killed or crashed \(more in .*\)", last
    ), run.describe()
    assert not run.events("fence", "recovered")
    run.assert_gone()


@slow
def test_a_recurring_fault_ends_the_run_with_its_cause(nodes, start_run):
    nodes.resize(2, 2)
    run = start_run(
        "mesh.pp=2",
        "schedule.name=1f1b",
        "schedule.microbatches=4",
        'data.path="fake:rank=1,step=3,how=die"',
        command=FAKE,
    )
    assert run.end() == 1
    # one more recovery if a step was recorded before the second fault
    recoveries = [row["how"] for row in run.events("recovered")]
    assert recoveries in (["checkpoint"] * 3, ["checkpoint"] * 4), run.describe()
    last = run.printed.read_text().strip().splitlines()[-1]
    assert re.fullmatch(r"pentad: rank 1 .* died.*: its process was killed or crashed.*", last), run.describe()
    run.assert_gone()


@slow
def test_what_a_run_has_left_can_be_cleared_for_the_next_test(nodes, start_run):
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b")
    run.wait_for_step(1)
    run.stop()
    assert nodes.ranks() and nodes.free_cpus() == 2
    nodes.clear()
    until = time.monotonic() + 20
    while nodes.ranks() or nodes.free_cpus() < 6:
        assert time.monotonic() < until, nodes.ranks()
        time.sleep(0.1)
