"""Ranks that stay slow move elsewhere, or stay, which is reported once; in this process (`fake_ray`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_ray import FakeRun

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.evictions import AGAIN, BESIDE_SECONDS, reason_to_stay, with_ranks_beside
from pentad.orchestrator.recovery.recovery import CHECK_SECONDS
from pentad.orchestrator.run import driver
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.workers.checkpoint.checkpoint import Start

StartRun = Callable[..., FakeRun]
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # no rank's state is anywhere else
TENSOR = ("mesh.dp=2", "mesh.pp=1", "mesh.tp=2", "schedule.microbatches=4")
EVICT = ("elastic.slow_rank=evict", "elastic.wait_seconds=3")


def slow(*ranks: int, step: int = 7) -> SlowRank:
    return SlowRank("compute", ranks, step, 3, 0.2, (("F", 0, 0.2),))


def asked(run: FakeRun, *found: SlowRank, seconds: float = CHECK_SECONDS) -> Any:
    """What the step loop is told after this many seconds with these slow ranks."""
    run.bus.lasting_slow_ranks = found
    run.fake.now += seconds
    return run.recovery.should_regroup({})


@pytest.mark.parametrize(("mesh", "saved"), [(SQUARE, False), (LINE, True), ((*SQUARE, "zero.stage=3"), True)])
def test_a_slow_rank_moves_to_a_spare_node_and_no_step_is_lost(
    start: StartRun, mesh: tuple[str, ...], saved: bool
) -> None:
    run = start(*mesh, *EVICT, "elastic.max_failures=0")
    run.fake.spare = ["node2"]
    if saved:  # as the step loop does at this boundary
        run.save(7)
    assert asked(run, slow(3)) == (3,)
    state = run.recovery.regroup(7)
    assert state.version == 7 and run.versions() == [7] * 4
    assert [rank.node for rank in run.fake.members()][3] == "node2"
    assert run.fake.members()[:3] == run.before[:3]
    (event,) = run.events("evicted")
    assert (event["ranks"], event["moved"], event["excess"], event["target"]) == ([3], [3], 0.2, "node2")
    assert event["evidence"] == [["F", 0, 0.2]] and "computes 20 % longer than its peers" in event["sentence"]
    assert [(row["rank"], row["fault"], row["detector"]) for row in run.events("lost")] == [(3, "slow", "times")]


def test_only_evict_moves_ranks(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.spare = ["node2"]
    assert asked(run, slow(3)) is None and not run.group.placement.others


def test_with_nowhere_to_go_the_run_goes_on_and_says_so_once(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT)
    run.fake.spare = [run.before[3].node]  # the node that the rank should leave
    for _ in range(5):
        assert asked(run, slow(3)) is None
    (event,) = run.events("not evicted")
    assert event["cause"] == "no other node had room within elastic.wait_seconds = 3" and event["ranks"] == [3]
    assert len(run.group.placement.others) == 1 and run.group.placement.others[0].nodes.startswith("!in(")
    run.group.placement.others[0].node = "node2"  # joins later
    assert asked(run, slow(3)) == (3,)


def test_a_rank_that_is_no_longer_slow_stays_and_its_room_is_given_up(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT)
    assert asked(run, slow(3)) is None and run.group.placement.others
    assert asked(run) is None and not run.group.placement.others


def test_a_fault_gets_the_room_first(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT)
    run.fake.spare = ["node2"]
    assert asked(run, slow(3)) == (3,)
    run.recovery.recover(run.lose(1), 7)
    assert not run.group.placement.others and not run.events("evicted")
    assert run.fake.members()[3] is run.before[3]


def test_a_slow_replacement_stays(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT)
    run.fake.spare = ["node2", "node3"]
    assert asked(run, slow(3)) == (3,)
    run.recovery.regroup(7)
    assert asked(run, slow(3, step=40)) is None and asked(run, slow(3, step=41)) is None
    (event,) = run.events("not evicted")
    assert event["cause"] == "it moved after step 7, and is slow in its new place, too"
    assert not reason_to_stay(slow(3, step=7 + AGAIN), {3: 7}) and not reason_to_stay(slow(2, step=8), {3: 7})


def test_of_ranks_that_wait_for_each_other_inside_layers_none_moves(start: StartRun) -> None:
    run = start(*TENSOR, *EVICT)
    run.fake.spare = ["node2"]
    assert asked(run, slow(0, 1)) is None
    assert run.events("not evicted")[0]["cause"] == "which of these ranks is slow is not known"


def test_tensor_ranks_move_together_and_slow_ranks_of_a_node_at_once(start: StartRun) -> None:
    run = start(*TENSOR, *EVICT)
    run.fake.spare = ["node2"]
    ranks = [rank for rank, each in enumerate(run.before) if each.node == "node1"]
    assert asked(run, *map(slow, ranks)) == tuple(ranks)
    assert run.recovery.regroup(7).version == 7 and run.versions() == [7] * 4
    assert {rank.node for rank in run.fake.members()} == {"node0", "node2"}


def test_a_gpu_is_left_for_another_one_of_its_node_if_there_is_one(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT, device="cuda")
    node = run.before[3].node
    run.fake.spare = [node]
    assert asked(run, slow(3)) == (3,) and run.group.placement.others[0].nodes == node
    assert not run.recovery.evictions.left


def test_without_another_gpu_of_its_node_a_rank_leaves_the_node(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT, device="cuda")
    run.fake.spare = ["node2"]
    assert asked(run, slow(3)) is None
    assert asked(run, slow(3), seconds=BESIDE_SECONDS + 1) is None
    assert [room.nodes[0] for room in run.group.placement.others] == ["!"]
    assert asked(run, slow(3)) == (3,)


def test_ranks_that_copy_within_a_host_do_not_leave_it(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT, device="cuda")
    run.group.plan = replace(run.group.plan, transport="peer")
    run.fake.spare = ["node2"]
    for _ in range(5):
        assert asked(run, slow(3), seconds=BESIDE_SECONDS + 1) is None
    (event,) = run.events("not evicted")
    assert event["cause"] == "no other GPU of its node was free within elastic.wait_seconds = 3"


@pytest.mark.parametrize(
    ("words", "hosts", "rank", "moved"),
    [
        (("mesh.dp=2", "mesh.pp=1", "mesh.tp=2"), (0, 1, 2, 3), 2, (2, 3)),
        (("mesh.dp=2", "mesh.pp=2"), (0, 1, 0, 1), 3, (1, 3)),
        (("mesh.cp=2", "mesh.pp=2"), (0, 0, 1, 1), 3, (2, 3)),
        (("mesh.dp=2", "mesh.pp=2", "zero.stage=1"), (0, 0, 1, 1), 1, (0, 1)),
        (("mesh.dp=2", "mesh.pp=2"), (0, 0, 1, 1), 1, (1,)),
    ],
)
def test_ranks_that_exchange_by_peer_copies_move_together(
    words: tuple[str, ...], hosts: tuple[int, ...], rank: int, moved: tuple[int, ...]
) -> None:
    plan = make_plan(load(None, [*words, "schedule.name=1f1b"]), "cuda", hosts=hosts)
    assert with_ranks_beside([rank], plan) == moved


def test_a_rank_returns_if_none_starts_in_its_new_place(start: StartRun) -> None:
    run = start(*SQUARE, *EVICT)
    run.fake.spare = ["node2"]
    assert asked(run, slow(3)) == (3,)
    run.fake.lost_nodes.add("node2")  # meanwhile
    assert run.recovery.regroup(7).version == 7 and run.versions() == [7] * 4
    assert run.fake.members()[3].node == run.before[3].node and run.events("moved back")[0]["ranks"] == [3]


@pytest.mark.parametrize("mesh", [SQUARE, LINE, (*LINE, "elastic.replicate_every=3")])
def test_a_run_that_evicts_records_every_step_once(start: StartRun, mesh: tuple[str, ...]) -> None:
    run = start(*mesh, *EVICT)
    run.group.restore(Start())
    run.fake.spare = ["node2"]
    named = [False]

    def name_it(rank: Any, method: str) -> None:
        if method == "run" and rank.version >= 12 and not named[0]:
            named[0], run.bus.lasting_slow_ranks = True, (slow(1),)

    run.fake.on_call = name_it
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    assert [row["step"] for row in run.rows()] == list(range(run.config.run.steps))
    assert len(run.events("evicted")) == len(run.events("recovered")) == 1
    assert run.events("recovered")[0]["steps_replayed"] == 0
    assert run.fake.members()[1].node == "node2"
