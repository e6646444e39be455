"""Spare processes that wait to replace a lost rank; on ranks in this process (`fake_ray`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from fake_rank import Rank
from fake_ray import FakeRun
from hypothesis import given
from hypothesis import strategies as st

from pentad.orchestrator.cluster.worker import WorkerPlace
from pentad.orchestrator.recovery.recovery import CHECK_SECONDS
from pentad.orchestrator.recovery.spares import MOST_FAILURES, spare_nodes, standby_nodes

SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
StartRun = Callable[..., FakeRun]
nodes = st.lists(st.sampled_from("abc"), min_size=1, max_size=12)


@given(st.integers(0, 12), nodes)
def test_spares_are_where_ranks_are_and_no_node_is_left_out(count: int, places: Sequence[str]) -> None:
    found, ranks = spare_nodes(count, places), Counter(places)
    assert found.total() == count and set(found) <= set(ranks)
    for node in ranks:  # moving one elsewhere would not help
        assert all(ranks[node] / (found[node] + 1) <= ranks[other] / found[other] for other in found if other != node)


@given(st.integers(0, 12), nodes)
def test_another_spare_moves_none(count: int, places: Sequence[str]) -> None:
    assert (spare_nodes(count + 1, places) - spare_nodes(count, places)).total() == 1


@given(nodes, st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4)))
def test_by_default_spares_wait_for_the_loss_of_a_node_where_no_rank_is(
    places: Sequence[str], rooms: dict[str, int]
) -> None:
    found, needed = standby_nodes(places, rooms), max(Counter(places).values())
    elsewhere = {node: room for node, room in rooms.items() if node not in places}
    assert found.total() == min(needed, sum(elsewhere.values()))
    assert all(0 < found[node] <= elsewhere[node] for node in found)
    most = sorted(elsewhere.values(), reverse=True)[: max(0, len(found) - 1)]
    assert not found or sum(most) < needed  # fewer nodes would not do


def waiting(run: FakeRun) -> list[Rank]:
    """The spares, which are ready by now."""
    for _ in range(2):
        run.fake.now += CHECK_SECONDS + 0.1
        run.recovery.should_regroup({})
    return [spare.actor.rank for spare in run.recovery.ranks.spares.waiting]


def new_ranks(run: FakeRun) -> dict[int, Rank]:
    return {number: rank for number, rank in enumerate(run.fake.members()) if rank is not run.before[number]}


def test_by_default_nothing_waits_where_there_is_no_other_node(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.rooms = {"node0": 3, "node1": 1}  # beside the ranks
    assert waiting(run) == [] and len(run.fake.ranks) == 4


@pytest.mark.parametrize(("key", "device"), [("0", "cpu"), ("null", "cuda")])
def test_nothing_waits_on_other_nodes_without_the_key_and_on_gpus(start: StartRun, key: str, device: str) -> None:
    run = start(*SQUARE, f"elastic.spares={key}", device=device)
    run.fake.rooms = {"node2": 2}
    assert waiting(run) == []


def test_the_ranks_of_a_lost_node_are_spares_of_another_one(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.rooms = {"node2": 4}
    spares = waiting(run)
    assert [rank.node for rank in spares] == ["node2", "node2"]
    run.fake.rooms = None  # the cluster's head is away: spares stay
    assert waiting(run) == spares and all(rank.is_alive for rank in spares)
    fault = run.lose(1, 3)
    run.fake.lose_node("node1")
    run.fake.on_sleep = lambda: setattr(run.fake, "nodes", ("node0", "node0", "node2", "node2"))  # Ray moves them
    run.recovery.recover(fault, 7)
    assert sorted(run.events("recovered")[0]["spares"]) == [1, 3] and run.versions() == [7] * 4
    assert sorted(rank.pid for rank in new_ranks(run).values()) == [rank.pid for rank in spares]
    run.fake.rooms = {"node2": 2}
    assert waiting(run) == []


def test_spares_leave_nodes_that_others_need(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.rooms = {"node2": 2, "node3": 1}
    first, second = waiting(run)
    run.fake.rooms = {"node2": 1}
    (left,) = waiting(run)
    assert left in (first, second) and [first.is_alive, second.is_alive].count(True) == 1


def test_a_lost_rank_is_a_spare_of_its_node_and_another_one_waits(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=2")
    first, second = waiting(run)
    assert (first.node, second.node) == ("node0", "node1") and run.bus.view.spares == 2
    state = run.recovery.recover(run.lose(3), 7)
    assert new_ranks(run) == {3: second} and run.versions() == [7] * 4 and state.version == 7
    assert run.events("recovered")[0]["spares"] == [3] and run.bus.view.spares == 1
    assert [rank.node for rank in waiting(run)] == ["node0", "node1"] and run.bus.view.spares == 2
    events = [row["event"] for row in run.bus.folder.journal() if row["event"].startswith("spare")]
    assert events == ["spare ready", "spare ready", "spare taken", "spare ready"]


def calls_of(run: FakeRun, *methods: str) -> list[tuple[Rank, str]]:
    """A growing list of (rank, method) of these calls to ranks from now on."""
    found = list[tuple[Rank, str]]()
    run.fake.on_call = lambda rank, method: found.append((rank, method)) if method in methods else None
    return found


def test_a_spare_loads_while_the_others_are_fenced(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=1")
    (spare,) = waiting(run)
    calls = calls_of(run, "begin", "fence", "start")
    run.recovery.recover(run.lose(0), 7)
    assert calls[0] == (spare, "begin") and new_ranks(run) == {0: spare}
    assert [rank for rank, method in calls if method == "start"] == run.before[1:]


def test_a_spare_that_loads_starts_again_if_another_rank_is_lost_meanwhile(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=1")
    (spare,) = waiting(run)

    asked = list[str]()

    def lose_another(rank: Rank, method: str) -> None:
        run.before[3].is_alive &= method != "connect"
        asked.extend([method] if rank is spare and method in ("begin", "start") else [])

    fault, run.fake.on_call = run.lose(0), lose_another
    run.recovery.recover(fault, 7)
    assert new_ranks(run)[0] is spare and sorted(new_ranks(run)) == [0, 3] and run.versions() == [7] * 4
    assert asked == ["begin", "start"]


def test_a_spare_that_has_loaded_and_is_no_rank_ends(start: StartRun) -> None:
    """It might hold a GPU. The mesh shrinks, as another node has gone meanwhile."""
    run = start(*SQUARE, "elastic.spares=1", "elastic.min_ranks=1", "elastic.wait_seconds=1")
    (spare,) = waiting(run)
    fault = run.lose(0, 1, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert run.events("recovered")[0]["how"] == "shrink" and run.fake.members() == [run.before[2]]
    assert not spare.is_alive and not run.recovery.ranks.spares.waiting


def test_ranks_without_a_spare_on_their_node_are_started_as_usual(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=1")
    (spare,) = waiting(run)
    run.recovery.recover(run.lose(1, 2), 7)  # one on each node
    assert new_ranks(run)[2] is spare and new_ranks(run)[1].node == "node1"
    assert run.events("recovered")[0]["spares"] == [2] and run.versions() == [7] * 4


def test_a_lost_node_takes_its_spare_with_it(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=2")
    waiting(run)
    fault = run.lose(1, 3)
    run.fake.lose_node("node1")
    run.fake.on_sleep = lambda: setattr(run.fake, "nodes", ("node0", "node0", "node2", "node2"))  # Ray moves them
    run.recovery.recover(fault, 7)
    assert {rank.node for rank in new_ranks(run).values()} == {"node2"}
    assert run.events("recovered")[0]["spares"] == []
    assert [rank.node for rank in waiting(run)] == ["node0", "node2"]


@pytest.mark.parametrize("fails", ["dies", "hangs", "dies as it is taken"])
def test_a_spare_that_is_gone_costs_nothing_but_itself(start: StartRun, fails: str) -> None:
    run = start(*SQUARE, "elastic.spares=1")
    (spare,) = waiting(run)
    spare.is_alive, spare.hangs = fails == "hangs", fails == "hangs"
    if fails == "dies":
        waiting(run)
        assert run.events("spare lost")[0]["was_ready"]
    elif fails == "hangs":  # its last call is unanswered
        run.recovery.ranks.spares.waiting[0].answer.is_ready = False
    run.recovery.recover(run.lose(0), 7)
    assert new_ranks(run)[0] is not spare and run.versions() == [7] * 4
    assert run.events("recovered")[0]["spares"] == ([0] if fails == "dies" else []), "the next one has begun to start"


def test_a_spare_that_has_begun_to_start_is_ahead_of_a_new_process(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=1")
    run.recovery.ranks.spares.keep()
    (starting,) = run.recovery.ranks.spares.waiting
    starting.answer.is_ready = False
    run.recovery.recover(run.lose(0), 7)
    assert new_ranks(run)[0] is starting.actor.rank and run.versions() == [7] * 4
    assert run.events("recovered")[0]["spares"] == [0]


def no_module(rank: Rank, device: str) -> WorkerPlace:
    raise ImportError("no module")


def test_spares_that_cannot_start_are_given_up(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "warm", no_module)
    run = start(*SQUARE, "elastic.spares=1")
    for _ in range(MOST_FAILURES):
        waiting(run)
    assert len(run.events("spare lost")) == MOST_FAILURES and not run.recovery.ranks.spares.waiting
    assert [rank.is_alive for rank in run.fake.ranks] == [True] * 4 + [False] * MOST_FAILURES


def test_a_spare_gets_the_gpu_of_the_rank_only_where_that_is_known(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = lambda rank: WorkerPlace(rank.node, "10.0.0.1", rank.bundle, rank.pid, "/nowhere")  # noqa: E731
    monkeypatch.setattr(Rank, "place", place)
    run = start(*SQUARE, "elastic.spares=2", device="cuda")
    assert len(waiting(run)) == 2
    run.recovery.recover(run.lose(3), 7)
    assert run.events("recovered")[0]["spares"] == [3] and run.group.places[3].gpu == 3
    waiting(run)
    bundle = run.group.bundles[2]
    room = SimpleNamespace(node=run.before[2].node)
    run.group.placement.move([bundle], room)  # to another GPU of its node: which one only Ray knows
    run.recovery.recover(run.lose(2), 7)
    assert run.events("recovered")[1]["spares"] == []


def test_spares_end_with_the_run(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.spares=3")
    (*spares,) = waiting(run)
    run.group.stop(kill=True)
    assert len(spares) == 3 and not any(rank.is_alive for rank in run.fake.ranks)
