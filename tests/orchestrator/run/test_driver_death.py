"""The driver is killed at any point: the next one adopts the ranks, and the run ends with the bits of a run without
faults. Real ranks on a Ray cluster of several nodes on this machine, whose head is no child of the driver.

The default suite has one such death in `test_elastic.py`, and the rules in `recovery/test_adoption.py` and
`cluster/test_lease.py`.
"""

from __future__ import annotations

import signal
import time

import pytest
from dying_driver import command
from elastic_cases import (
    CONTEXT,
    CUT,
    EXPERT_PIPE,
    LINE,
    PAIR,
    SMALL,
    SQUARE,
    TENSOR_PIPE,
    Outcome,
    assert_same,
)
from multinode import Run, kill

from pentad.orchestrator.control.control_client import connect

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NO_SAVES = ("checkpoint.every_seconds=0",)
COPIES = ("elastic.replicate_every=3", *NO_SAVES)


def assert_adopted(run: Run, expected: Outcome, *overrides: str, how: tuple[str, ...] = ("adopt",)) -> Run:
    """Starts the run again, and asserts that it takes over what is left and ends with the `expected` bits."""
    before = len(run.events("recovered"))
    again = Run(run.cluster, run.folder.parent, *SMALL, *overrides)
    try:
        assert again.end() == 0, again.describe()
        assert again.events("start")[-1]["adopts"], again.describe()
        assert tuple(row["how"] for row in again.events("recovered")[before:]) == how, again.describe()
        assert "resuming from step" not in again.printed.read_text()
        assert_same(again, expected)
        again.assert_gone()
    finally:
        again.stop()
    return again


def wait_until_dead(run: Run) -> None:
    assert run.end() == -signal.SIGKILL, run.describe()


@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        ("1f1b", SQUARE),
        ("zb-h2", PAIR),
        ("dualpipe", LINE),
        ("1f1b", CUT),
        ("1f1b", TENSOR_PIPE),
        ("1f1b", EXPERT_PIPE),
        ("1f1b", (*CONTEXT, "zero.stage=3")),
    ],
)
def test_a_killed_driver_costs_no_step(nodes, start_run, reference, schedule, mesh):
    expected, overrides = reference(*mesh, f"schedule.name={schedule}"), (*mesh, f"schedule.name={schedule}", *NO_SAVES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_step(8)
    run.stop()
    again = assert_adopted(run, expected, *overrides)
    assert {row["steps_replayed"] for row in again.events("recovered")} == {0}
    assert {row["step"] for row in again.events("checkpoint")} == {60}


@pytest.mark.parametrize(
    "point",
    [
        "before the ranks have a state",
        "a call has reached some of the ranks",
        "the ranks have taken steps that are not recorded",
        "a step is in audit.jsonl, but not in metrics.jsonl",
        "a checkpoint is written, but not committed",
        "a checkpoint is committed, but not recorded",
        "a copy in memory is made, but does not count",
    ],
)
@pytest.mark.parametrize(("schedule", "mesh"), [("1f1b", CUT), ("zb-h2", (*SQUARE, "schedule.post_validation=true"))])
def test_the_point_at_which_a_driver_dies_does_not_matter(nodes, start_run, reference, schedule, mesh, point):
    expected = reference(*mesh, f"schedule.name={schedule}")
    overrides = (*mesh, f"schedule.name={schedule}", "checkpoint.every=10", "elastic.replicate_every=3")
    nodes.resize(2, 2, 2)
    run = start_run(*overrides, command=command(point))
    wait_until_dead(run)
    how = "checkpoint" if point == "before the ranks have a state" else "adopt"  # the state that a run starts from
    assert_adopted(run, expected, *overrides, how=(how,))


@pytest.mark.parametrize(
    ("point", "mesh", "how"),
    [
        ("a lost rank is not replaced", SQUARE, "repair"),
        ("a lost rank is replaced, but has no state", SQUARE, "adopt"),
        ("the ranks have their state again, but what they did is not recorded", SQUARE, "adopt"),
        ("a lost rank is not replaced", CUT, "copies"),
        ("copies are about to be restored", CUT, "copies"),
    ],
)
def test_a_driver_that_dies_during_a_recovery(nodes, start_run, reference, point, mesh, how):
    expected, overrides = reference(*mesh, "schedule.name=1f1b"), (*mesh, "schedule.name=1f1b", *COPIES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides, command=command(point))
    run.wait_for_step(8)
    run.signal_ranks(1)
    wait_until_dead(run)
    assert_adopted(run, expected, *overrides, how=(how,))


def test_a_driver_that_dies_during_an_adoption(nodes, start_run, reference):
    expected, overrides = reference(*SQUARE, "schedule.name=1f1b"), (*SQUARE, "schedule.name=1f1b", *NO_SAVES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_step(8)
    run.stop()
    point = "the ranks have their state again, but what they did is not recorded"
    second = Run(nodes, run.folder.parent, *SMALL, *overrides, command=command(point))
    wait_until_dead(second)
    assert_adopted(run, expected, *overrides)


@pytest.mark.parametrize(
    ("mesh", "ranks", "how", "result"),
    [
        (SQUARE, (2,), signal.SIGKILL, "repair"),
        (SQUARE, (2,), signal.SIGSTOP, "repair"),
        (CUT, (3,), signal.SIGKILL, "copies"),
        (CUT, (3,), signal.SIGSTOP, "copies"),
    ],
)
def test_a_rank_is_lost_with_the_driver(nodes, start_run, reference, mesh, ranks, how, result):
    expected, overrides = reference(*mesh, "schedule.name=1f1b"), (*mesh, "schedule.name=1f1b", *COPIES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_step(8)
    run.stop()
    run.signal_ranks(*ranks, how=how)
    assert_adopted(run, expected, *overrides, how=(result,))


def test_a_node_is_lost_with_the_driver(nodes, start_run, reference):
    expected, overrides = reference(*CUT, "schedule.name=1f1b"), (*CUT, "schedule.name=1f1b", *COPIES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_step(8)
    run.stop()
    kill(nodes.node_of(run.pids()[0]))
    assert_adopted(run, expected, *overrides, how=("copies",))


def test_all_ranks_are_lost_with_the_driver(nodes, start_run, reference):
    expected, overrides = (
        reference(*SQUARE, "schedule.name=1f1b"),
        (*SQUARE, "schedule.name=1f1b", "checkpoint.every=10"),
    )
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_checkpoint(10)
    run.stop()
    run.signal_ranks(0, 1, 2, 3)
    again = Run(nodes, run.folder.parent, *SMALL, *overrides)
    try:
        assert again.end() == 0, again.describe()
        assert "resuming from step" in again.printed.read_text()
        assert_same(again, expected)
        again.assert_gone()
    finally:
        again.stop()


def test_another_configuration_begins_with_other_ranks_at_the_newest_checkpoint(nodes, start_run):
    nodes.resize(2, 2, 2)
    run = start_run(*SQUARE, "schedule.name=1f1b", "checkpoint.every=10")
    run.wait_for_checkpoint(10)
    run.stop()
    again = Run(nodes, run.folder.parent, *SMALL, *PAIR, "schedule.name=1f1b", "checkpoint.every=10")
    try:
        assert again.end() == 0, again.describe()
        assert not again.events("start")[-1]["adopts"] and again.events("start")[-1]["step"] >= 10
        again.assert_gone()
    finally:
        again.stop()


def test_a_second_driver_is_refused_while_the_first_lives(nodes, start_run, reference):
    expected = reference(*SQUARE, "schedule.name=1f1b")
    nodes.resize(2, 2, 2)
    overrides = (*SQUARE, "schedule.name=1f1b")
    run = start_run(*overrides)
    run.wait_for_step(4)
    (run.folder / ".lock").unlink()  # as where a shared folder has no locks
    with connect(run.folder) as client:
        client.request("pause")  # else the run might end meanwhile
        second = Run(nodes, run.folder.parent, *SMALL, *overrides)
        try:
            assert second.end() == 1, second.describe()
            text = " ".join(second.printed.read_text().split())
            assert (
                f"pentad: run.name is run, whose ranks another driver commands (process {run.process.pid} on " in text
            )
        finally:
            second.stop()
        client.request("resume")
    assert run.end() == 0, run.describe()
    assert not run.events("fence")
    assert_same(run, expected)
    run.assert_gone()


@pytest.mark.parametrize("spares", [0, 2])
def test_without_a_driver_nothing_is_left_once_the_lease_has_expired(nodes, start_run, spares):
    nodes.resize(2, 2, 2)
    words = f"elastic.spares={'null' if spares else 0}", "elastic.driver_lease=6", "run.steps=100000"
    run = start_run(*SQUARE, "schedule.name=1f1b", *words)
    run.wait_for_step(4)
    run.wait_for(lambda: len(run.events("spare ready")) == spares)
    run.stop()
    ended = time.monotonic()
    time.sleep(4.0)
    assert len(nodes.ranks()) == 5 + spares, nodes.ranks()  # including the keeper of the lease
    while nodes.ranks():
        assert time.monotonic() < ended + 6 + 4, nodes.ranks()
        time.sleep(0.1)
    assert time.monotonic() > ended + 5
    assert nodes.free_cpus() == 6


def test_a_keeper_that_dies_is_replaced_and_refuses_as_before(nodes, start_run, reference):
    expected, overrides = reference(*SQUARE, "schedule.name=1f1b"), (*SQUARE, "schedule.name=1f1b", *NO_SAVES)
    nodes.resize(2, 2, 2)
    run = start_run(*overrides)
    run.wait_for_step(4)
    nodes.kill_keeper()
    run.wait_for_step(12)
    run.stop()
    assert_adopted(run, expected, *overrides)
