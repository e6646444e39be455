"""Which ranks a driver considers lost; on ranks in this process (`fake_ray`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_ray import FakeRun
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from pentad.orchestrator.cluster.faults import (
    PING_SECONDS,
    PROBE_SECONDS,
    Failure,
    WorkerError,
    error_of,
    unresponsive,
)
from pentad.orchestrator.recovery import regroup

SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
StartRun = Callable[..., FakeRun]
RESET = RayTaskError("run", "RuntimeError: Connection reset by peer", RuntimeError("Connection reset by peer"))
UNAVAILABLE = ActorUnavailableError("Socket closed", None)


def fault_of(run: FakeRun, rank: int, error: RayError) -> WorkerError:
    found = error_of(run.group, [Failure(rank, error)])
    assert isinstance(found, WorkerError)
    return found


def test_a_rank_that_is_starved_for_two_seconds_is_not_lost(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.members()[1].hangs = True
    began = run.fake.now
    assert unresponsive(run.group) == ((1,), False)
    assert 2.0 < PING_SECONDS <= run.fake.now - began <= PING_SECONDS + 2 * PROBE_SECONDS


def test_the_ranks_of_a_node_that_is_gone_are_lost_at_once_and_others_that_are_slow_are_not(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.members()[0].hangs = True  # on node 0, where Ray still runs
    run.fake.lose_node("node1")
    began = run.fake.now
    fault = fault_of(run, 2, RESET)
    assert (fault.lost, fault.fault, fault.detector) == ((1, 3), "node", "peer")
    assert run.fake.now - began < 2 * PROBE_SECONDS
    assert str(fault).endswith("do not answer, and Ray has ended on their nodes")


@pytest.mark.parametrize(("gone", "lost", "kind"), [("node1", (1, 3), "node"), ("node2", (3,), "killed")])
def test_a_death_that_nothing_on_its_node_explains_is_that_of_the_node_if_that_is_gone(
    start: StartRun, gone: str, lost: tuple[int, ...], kind: str
) -> None:
    run = start(*SQUARE)
    run.fake.lose_node(gone)
    fault = fault_of(run, 3, UNAVAILABLE)
    assert (fault.lost, fault.fault, fault.detector) == (lost, kind, "ray")


def test_ray_is_told_of_the_nodes_of_lost_ranks(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[set[str]]()
    monkeypatch.setattr(regroup, "forget_gone_nodes", told.append)
    run = start(*SQUARE)
    run.recovery.recover(run.lose(3), 7)
    assert told == [{"node1"}] and run.versions() == [7] * 4
