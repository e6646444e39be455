"""Copies in the memory of ranks: how the driver has them made, counts them and recovers from them (`fake_ray`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ray import FakeRun, Rank
from hypothesis import given
from hypothesis import strategies as st

from pentad.orchestrator.cluster.copies import holders_of, newest_copy
from pentad.orchestrator.cluster.placement import failure_domains
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import first_plan
from pentad.orchestrator.recovery import newest_checkpoint, regroup
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start, Unreadable, recover
from pentad.workers.replication.parts import CopyKey, HeldPart

LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8", "elastic.replicate_every=3")  # no replicas
SHRINKS = ("elastic.min_ranks=2", "elastic.wait_seconds=1")
StartRun = Callable[..., FakeRun]


@pytest.mark.parametrize("sizes", [(1, 1), (4, 4), (8, 8, 8), (2, 1, 1), (3, 2), (1, 3), (5,), (2, 7)])
def test_parts_are_on_other_nodes_unless_one_has_more_than_half_of_the_ranks(sizes: tuple[int, ...]) -> None:
    nodes = [name for size, name in zip(sizes, "ABC", strict=False) for name in name * size]
    holders = holders_of(nodes, nodes)
    assert sorted(holders) == list(range(len(nodes))), "each rank holds one part"
    assert all(holder != rank for rank, holder in enumerate(holders))
    near = sum(nodes[rank] == nodes[holder] for rank, holder in enumerate(holders))
    assert near == max(0, 2 * max(sizes) - len(nodes))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=16))
def test_parts_are_in_other_failure_domains_unless_one_has_more_than_half_of_the_ranks(
    places: list[tuple[int, int]],
) -> None:
    domains, nodes = [str(domain) for domain, _ in places], [f"{domain}-{node}" for domain, node in places]
    holders = holders_of(nodes, domains)
    assert sorted(holders) == list(range(len(places))), "each rank holds one part"
    for where in (nodes, domains):
        if 2 * max(Counter(where).values()) <= len(places):
            assert all(where[rank] != where[holder] for rank, holder in enumerate(holders))


def test_a_node_without_the_label_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": name, "Labels": labels} for name, labels in (("a", {"rack": "r1"}), ("b", {}), ("c", {}))]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert failure_domains(["b", "a", "b"], "rack") == ["b", "r1", "b"]
    assert failure_domains(["b", "a"], None) == ["b", "a"]
    assert failure_domains(["b", "c"], "rack") == ["b", "c"], "as after the loss of all nodes that have it"


def test_a_copy_counts_if_one_process_knows_it_and_all_parts_are_there() -> None:
    old, new = CopyKey(1, 3, 2), CopyKey(1, 6, 2)

    def part(key: CopyKey, owner: int, committed: bool = False) -> HeldPart:
        return HeldPart(key, owner, 1, committed, {})

    def newest(*processes: list[HeldPart]) -> CopyKey | None:
        found = newest_copy({str(number): parts for number, parts in enumerate(processes)}, b"")
        return found and found.key

    prepared = [part(old, 0, True), part(old, 1, True), part(new, 0), part(new, 1)]
    assert newest(prepared, prepared) == old, "nobody knows yet that all parts are in place"
    told = [part(new, 0, True), part(new, 1, True)]
    assert newest(told, prepared) == new, "one process has dropped the old one already"
    assert newest(told[:1], prepared[2:3]) is None, "rank 1 and its holder are lost"
    assert newest([part(CopyKey(2, 3, 1), 0, True)], [part(old, 1, True)]) == CopyKey(2, 3, 1)
    assert newest([]) is None


def copied(start: StartRun, step: int, *overrides: str) -> FakeRun:
    """A run that has done seven steps and has a copy of its state after `step` of them."""
    run = start(*LINE, *overrides)
    run.copies.begin_generation()
    run.copies.submit(step)
    run.copies.commit(step)
    return run


@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1), (2, 3), (1, 2), (0, 3)])
def test_ranks_that_do_not_hold_each_others_parts_are_replaced_without_a_disk(start: StartRun, ranks: tuple) -> None:
    run = copied(start, 5)
    assert run.copies.holders == (2, 3, 0, 1)
    state = run.recovery.recover(run.lose(*ranks), 7)
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["step"], recovered["steps_replayed"]) == ("copies", 5, 2)
    assert state.version == 5 and run.versions() == [5] * 4


@pytest.mark.parametrize(("saved", "counts"), [(6, False), (4, True)])
def test_a_store_that_is_away_does_not_take_the_run_back_beyond_its_newest_checkpoint(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, saved: int, counts: bool
) -> None:
    """Else a later recovery might find that checkpoint and skip the steps in between."""
    run = copied(start, 5, "cluster.start_timeout_seconds=0.1")
    run.save(saved)
    run.bus.record("checkpoint", generation=1, step=saved)
    monkeypatch.setattr(regroup, "complete_folders", away)
    monkeypatch.setattr(newest_checkpoint, "recover", away)
    if counts:
        assert run.recovery.recover(run.lose(1), 7).version == 5
    else:
        with pytest.raises(Unreadable, match=r"^the store is away$"):
            run.recovery.recover(run.lose(1), 7)


def test_nor_does_one_whose_checkpoints_are_gone(start: StartRun) -> None:
    run = copied(start, 5)
    run.save(6)
    run.bus.record("checkpoint", generation=1, step=6)
    Path(str(run.folder.checkpoints)).rename(run.folder.path / "away")
    with pytest.raises(PentadError, match=r"has no checkpoint, but the run has committed that of 6 steps: expected"):
        run.recovery.recover(run.lose(1), 7)


def test_a_store_that_comes_back_is_waited_for(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, answers, notes = copied(start, 5), iter([away, away]), list[str]()
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.save(6)
    monkeypatch.setattr(newest_checkpoint, "recover", lambda *given, **more: next(answers, recover)(*given, **more))
    assert run.recovery.recover(run.lose(1), 7).version == 6
    assert [note for note in notes if "trying" in note] == ["trying again for 100 s: the store is away"]


def away(*_: object, **__: object) -> None:
    raise Unreadable("the store is away")


@pytest.mark.parametrize("saved", [0, 4])
def test_a_rank_and_its_holder_lost_at_once_go_back_to_the_disk_and_say_so(start: StartRun, saved: int) -> None:
    run = copied(start, 5)
    if saved:
        run.save(saved)
    state = run.recovery.recover(run.lose(0, 2), 7)
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("checkpoint", saved)]
    assert run.versions() == [saved] * 4 and state.version == saved
    (event,) = run.events("copies lost")
    assert event["ranks"] == [0, 2]


@pytest.mark.parametrize(("saved", "how"), [(4, "copies"), (5, "copies"), (6, "checkpoint")])
def test_the_newest_state_is_restored_from_memory_first(start: StartRun, saved: int, how: str) -> None:
    run = copied(start, 5)
    run.save(saved)
    state = run.recovery.recover(run.lose(1), 7)
    assert [row["how"] for row in run.events("recovered")] == [how] and state.version == max(5, saved)


@pytest.mark.parametrize("saved", [(6,), (4, 6), (6, 7)])
def test_a_newer_checkpoint_that_is_damaged_does_not_take_the_run_back_beyond_its_copy(
    start: StartRun, saved: tuple[int, ...]
) -> None:
    run = copied(start, 5)
    for step in saved:
        run.save(step)
        if step > 5:
            Path(str(run.folder.checkpoint(step)), "manifest.json").write_bytes(b"torn")
    assert run.recovery.recover(run.lose(1), 7).version == 5
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("copies", 5)]
    assert run.folder.saved() == [step for step in saved if step < 5], "their steps can be saved again"


def test_a_fault_while_a_copy_is_restored_is_recovered_from_the_same_copy(start: StartRun) -> None:
    run, done = copied(start, 5), list[str]()

    def on_call(rank: Rank, method: str) -> None:
        if (method, rank.number) == ("restore_copy", 1) and not done:
            done.append(method)
            rank.is_alive = False

    run.fake.on_call = on_call
    state = run.recovery.recover(run.lose(0), 7)
    assert done and state.version == 5 and run.versions() == [5] * 4
    assert [row["how"] for row in run.events("recovered")] == ["copies"] and len(run.events("fence")) == 2


@pytest.mark.parametrize(("failures", "how"), [(1, "copies"), (2, "checkpoint")])
def test_a_copy_that_cannot_be_read_is_read_once_more_and_then_a_checkpoint(
    start: StartRun, failures: int, how: str
) -> None:
    """The connection to a process breaks, but the process is alive."""
    run, calls = copied(start, 5), list[int]()
    run.save(4)

    def on_call(rank: Rank, method: str) -> None:
        if method == "restore_copy" and rank.number == 0:
            calls.append(rank.number)
            reader = next(each for each in run.fake.ranks if each.is_alive and each.number == 3)
            reader.copy_problem = Unreadable("reset by peer") if len(calls) <= failures else None

    run.fake.on_call = on_call
    version = run.recovery.recover(run.lose(1), 7).version
    assert (version, run.versions()) == ((5, [5] * 4) if how == "copies" else (4, [4] * 4)) and len(calls) == 2
    assert [row["how"] for row in run.events("recovered")] == [how]
    assert [(row["step"], row["cause"]) for row in run.events("copies unread")] == [(5, "reset by peer")] * failures


def test_a_mesh_shrinks_from_a_copy_and_spare_ranks_end_afterwards(start: StartRun) -> None:
    run = copied(start, 5, *SHRINKS)
    fault = run.lose(2, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["step"], row["mesh"]) for row in run.events("recovered")] == [("shrink", 5, "pp2")]
    assert run.versions() == [5, 5] and not run.fake.written


def test_a_rank_lost_while_parts_are_sent_leaves_the_copy_before(start: StartRun) -> None:
    run = copied(start, 3)
    fault = run.lose(3)
    run.copies.submit(6)  # rank 1, whose part was on rank 3, finds it gone
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("copies", 3)]


def test_a_run_makes_copies_and_goes_back_to_the_newest(start: StartRun) -> None:
    run = start(*LINE, "run.steps=30")
    run.fake.faults = {14: (1,), 22: (0, 3)}
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 30
    found = [(row["how"], row["step"]) for row in run.events("recovered")]
    assert found == [("copies", 9), ("copies", 18)]  # steps 12 and 21 were open when the ranks died
    (first, *_) = run.events("copies")
    assert (first["step"], first["holders"], first["on_the_same_node"]) == (0, [2, 3, 0, 1], 0)


def test_a_single_rank_has_no_peer() -> None:
    with pytest.raises(PentadError, match=r"elastic.replicate_every is 3: expected 0 with a single rank"):
        load(None, ["mesh.pp=1", "elastic.replicate_every=3"])


def test_a_failure_domain_without_copies_is_refused() -> None:
    with pytest.raises(PentadError, match=r"elastic.failure_domain is 'a': expected null without elastic.replicate_"):
        load(None, ["elastic.failure_domain=a"])
    assert load(None, ["elastic.failure_domain=a", "elastic.replicate_every=3"]).elastic.failure_domain == "a"


def test_copies_that_do_not_fit_in_the_memory_of_this_machine_are_refused_before_anything_starts() -> None:
    config = load(None, ["elastic.replicate_every=3", "model.hidden=65536", "model.ffn=262144", "model.heads=64"])
    with pytest.raises(
        PentadError, match=r"does not fit: all ranks together need .* TiB of this machine, .*\(rank \d: copies .* TiB, "
    ):
        first_plan(config)


def test_a_node_that_drains_is_left_with_a_copy_instead_of_a_checkpoint(start: StartRun) -> None:
    run = start(*LINE, "run.steps=30")
    run.group.restore(Start())

    def on_call(rank: Rank, method: str) -> None:
        if method == "run" and rank.number == 0 and rank.version > 6 and not run.events("lost"):
            run.fake.draining = {"node1": int(1000 * (run.fake.now + 4))}
        elif method == "fence":
            run.fake.draining = {}  # another node has taken its place

    run.fake.on_call = on_call
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 30
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["steps_replayed"]) == ("copies", 0)
    assert [row["step"] for row in run.events("checkpoint")] == [30]


@pytest.mark.parametrize(
    ("ranks", "how", "checkpoints"), [((1,), "copies", [30]), ((2, 3), "copies", [30]), ((0, 2), "checkpoint", [7, 30])]
)
def test_ranks_that_receive_sigterm_hand_their_state_over_and_no_step_is_lost(
    start: StartRun, ranks: tuple[int, ...], how: str, checkpoints: list[int]
) -> None:
    """Through a copy in memory, or through a checkpoint if they hold each other's parts."""
    run = start(*LINE, "run.steps=30")
    run.group.restore(Start())

    def on_call(rank: Rank, method: str) -> None:
        if method == "run" and rank.number in ranks and rank.version > 4 and not run.events("lost"):
            rank.leaving = "received SIGTERM"

    run.fake.on_call = on_call
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 30
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["steps_replayed"]) == (how, 0)
    assert {(row["rank"], row["fault"], row["detector"]) for row in run.events("lost")} == {
        (rank, "terminated", "notice") for rank in ranks
    }
    assert len(run.events("checkpoint")) == len(checkpoints)


def test_a_node_whose_end_a_file_announces_is_drained_and_left_five_seconds_before(start: StartRun) -> None:
    run = start(*LINE, "run.steps=300", "elastic.notice_seconds=30")
    run.group.restore(Start())
    announced, left = list[float](), list[float]()

    def on_call(rank: Rank, method: str) -> None:
        if method == "run" and rank.node == "node1" and rank.version > 6 and not announced:
            rank.node_leaving = "/notice announces the end of its node"
            announced.append(run.fake.now)
        elif method == "fence" and not left:
            left.append(run.fake.now)
            run.fake.draining = {}  # another node has taken its place

    run.fake.on_call = on_call
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 300
    (notice,), (recovered,) = run.events("notice"), run.events("recovered")
    assert notice["drains"] and (recovered["how"], recovered["steps_replayed"]) == ("copies", 0)
    assert 25 <= left[0] - announced[0] <= 31


def test_no_copy_is_made_before_all_ranks_know_that_the_one_before_counts(start: StartRun) -> None:
    """A rank that does not know would drop the copy that counts to make room."""
    run = start(*LINE, "run.steps=60")
    run.group.restore(Start())
    committed: dict[int, set[int]] = {}

    def on_call(rank: Rank, method: str) -> None:
        if (method, rank.number) == ("copy", 0):
            before = [key.step for key, _ in rank.held]
            assert all(len(committed[step]) == 4 for step in before)
        elif method == "commit_copy":
            committed.setdefault(max(key.step for key, _ in rank.held), set()).add(rank.number)

    run.fake.on_call = on_call
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 60
    assert len(committed) > 5


def test_a_failed_transfer_is_a_note_and_the_next_one_counts(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(*LINE, "run.steps=30")
    run.group.restore(Start())
    replicate = Rank.replicate

    def refused(rank: Rank, generation: int, key: CopyKey, address: str, token: bytes) -> object:
        return "no room" if (key.step, rank.number) == (3, 2) else replicate(rank, generation, key, address, token)

    monkeypatch.setattr(Rank, "replicate", refused)
    run.fake.faults = {14: (1,)}
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 30
    assert [(row["step"], row["error"]) for row in run.events("copies failed")] == [(3, "no room")]
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("copies", 9)]
