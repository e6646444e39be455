"""Meshes that shrink and grow back, on ranks in this process (`fake_ray`); their state moves through memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ray import FakeRun, Rank
from recovery_runs import LINE, SHRINKS, SQUARE, StartRun, damage, die, once

from pentad.orchestrator.records import run_files
from pentad.orchestrator.recovery.recovery import CHECK_SECONDS
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

NO_SAVES = ("checkpoint.every=0", "checkpoint.every_seconds=0", "checkpoint.at_end=false")


def test_without_room_the_mesh_shrinks_and_the_state_moves_through_memory(start: StartRun) -> None:
    run = start(*SQUARE, *SHRINKS, nodes=("node0", "node0", "node1", "node2"))
    fault = run.lose(3)
    run.fake.lose_node("node2")
    run.recovery.recover(fault, 7)
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["mesh"], recovered["step"]) == ("shrink", "pp2", 7)
    assert run.folder.plan is run.group.plan and str(run.group.plan.mesh) == "pp2"
    assert not run.fake.written and not run.events("checkpoint")
    assert run.fake.members() == run.before[:2] and run.versions() == [7, 7]
    assert not any(rank.held for rank in run.fake.members()), "which takes memory"
    assert not run.before[2].is_alive  # the only holder of its stage, no longer a rank


@pytest.mark.parametrize("saved", [0, 7])
def test_a_state_for_which_there_is_no_memory_goes_through_a_checkpoint(start: StartRun, saved: int) -> None:
    run = start(*SQUARE, *SHRINKS)
    run.fake.full_memory = True
    if saved:
        run.save(saved)
    fault = run.lose(1, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("shrink", 7)]
    full = run.recovery.ranks.full
    if saved:
        assert not run.fake.written
    else:  # each shard once
        assert sorted(run.fake.written[7]) == sorted(full.param_shards) and len(run.events("checkpoint")) == 1


def test_such_a_checkpoint_counts_only_once_the_disk_keeps_the_records_of_its_steps(start: StartRun) -> None:
    """Even of the step that the ranks had taken and the driver did not know of: a run that resumes there lacks none."""
    run, seen = start(*SQUARE, *SHRINKS, *NO_SAVES, "run.steps=20"), list[tuple[int, list[int], int]]()
    run.fake.full_memory, run.fake.faults, run.fake.commits = True, {12: "node1"}, {12}

    def on_call(rank: Rank, method: str) -> None:
        if method == "commit":
            rows = [row["step"] for row in run.rows()]
            seen.append((rank.version, rows, len(run.folder.files.unsynced)))

    run.fake.on_call = on_call
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 20
    assert seen == [(13, [*range(13)], 0)]
    assert [row["step"] for row in run.rows()] == [*range(20)]


def test_such_a_checkpoint_does_not_count_while_the_disk_takes_no_records(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, lines: str, size: int) -> None:
        raise PentadError(f"{path} cannot be written")

    run = start(*SQUARE, *SHRINKS)
    monkeypatch.setattr(run_files, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(run_files, "append", full)
    run.fake.full_memory, fault = True, run.lose(1, 3)
    run.fake.lose_node("node1")
    with pytest.raises(PentadError, match=r"jsonl cannot be written; not written are "):
        run.recovery.recover(fault, 7)
    assert run.folder.saved() == []


def test_a_damaged_checkpoint_of_the_surviving_state_is_saved_again(start: StartRun) -> None:
    run = start(*SQUARE, *SHRINKS)
    run.fake.full_memory = True
    run.save(7)
    damage(run, 7)
    fault = run.lose(1, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert [row["step"] for row in run.events("recovered")] == [7] and run.fake.written[7]
    names = {path.name for path in (run.folder.path / "checkpoints").iterdir()}
    assert names == {"step-00000007", "step-00000007.refused-1"}


def test_a_mesh_without_the_newest_state_shrinks_from_the_newest_checkpoint(start: StartRun) -> None:
    run = start(*LINE, *SHRINKS)
    run.save(5)
    fault = run.lose(2, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("shrink", 5)]
    assert not run.fake.written and run.versions() == [5, 5]


@pytest.mark.parametrize("saved", [0, 5])
def test_a_fault_while_the_mesh_shrinks_is_repaired_from_what_the_others_have_handed_over(
    start: StartRun, saved: int
) -> None:
    """Even what was handed over by a process that is no rank of the smaller mesh."""
    run = start(*SQUARE, *SHRINKS, nodes=("node0", "node0", "node1", "node2"))
    if saved:
        run.save(saved)
    fault, run.fake.on_call = run.lose(3), once("connect", 1, die)
    run.fake.lose_node("node2")
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["mesh"], row["step"]) for row in run.events("recovered")] == [("copies", "pp2", 7)]
    assert run.versions() == [7, 7] and not run.before[2].is_alive


@pytest.mark.parametrize("saved", [0, 5])
def test_a_rank_that_is_lost_while_the_mesh_shrinks_with_what_only_it_held_costs_the_steps_since_a_checkpoint(
    start: StartRun, saved: int
) -> None:
    run = start(*SQUARE, *SHRINKS)
    if saved:
        run.save(saved)
    fault, run.fake.on_call = run.lose(1, 3), once("connect", 1, die)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("checkpoint", saved)]
    assert run.versions() == [saved, saved]


def shrunk(start: StartRun) -> FakeRun:
    """A run that has lost node1 and shrunk; the node is back."""
    run = start(*SQUARE, *SHRINKS)
    fault = run.lose(1, 3)
    run.fake.lose_node("node1")
    run.recovery.recover(fault, 7)
    assert run.recovery.should_regroup({}) is None
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) is None
    run.fake.lost_nodes.clear()
    assert run.recovery.should_regroup({}) is None  # asked again too soon
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) is not None
    return run


def test_a_shrunk_mesh_grows_back_around_the_ranks_it_has(start: StartRun) -> None:
    run = shrunk(start)
    state = run.recovery.regroup(7)
    assert [row["how"] for row in run.events("recovered")] == ["shrink", "grow"]
    assert run.group.plan is run.folder.plan is run.recovery.ranks.full
    assert run.group.generation == 3 and state.version == 7 and run.versions() == [7] * 4
    assert [run.fake.members()[rank] for rank in (0, 2)] == [run.before[rank] for rank in (0, 2)]
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) is None


def leave_again(run: FakeRun) -> None:
    run.fake.lost_nodes.add("node1")


def no_new_rank_answers(run: FakeRun) -> None:
    def on_call(rank: Rank, method: str) -> None:
        rank.hangs = rank.hangs or method == "place"

    run.fake.on_call = on_call


@pytest.mark.parametrize("prevent", [leave_again, no_new_rank_answers])
def test_the_old_group_is_kept_if_the_mesh_cannot_grow_after_all(
    start: StartRun, prevent: Callable[[FakeRun], None]
) -> None:
    run = shrunk(start)
    before, plan = run.fake.members(), run.group.plan
    prevent(run)
    state = run.recovery.regroup(7)
    assert run.events("recovered")[-1]["how"] == "repair" and state.version == 7
    assert run.fake.members() == before and run.group.plan is plan and run.group.generation == 3
    assert [rank for rank in run.fake.ranks if rank.is_alive] == before
    assert run.versions() == [7, 7]


def test_a_fault_while_the_mesh_grows_is_repaired_on_the_full_mesh(start: StartRun) -> None:
    run = shrunk(start)
    run.fake.on_call = once("connect", 3, lambda rank: run.fake.kill(rank.pid))
    run.recovery.regroup(7)
    assert run.events("recovered")[-1]["how"] == "copies" and run.events("recovered")[-1]["step"] == 7
    assert run.group.plan is run.recovery.ranks.full and not run.fake.written and run.versions() == [7] * 4


def trained(run: FakeRun) -> FakeRun:
    """Runs to the end. In step 12 a node is lost, and in step 18 one of the two remaining ranks: the only holder."""
    run.fake.faults = {12: "node1", 18: (1,)}
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    return run


def test_a_mesh_that_has_shrunk_leaves_a_checkpoint_for_the_next_fault(start: StartRun) -> None:
    run = trained(start(*SQUARE, *SHRINKS, "checkpoint.every=10"))
    assert [(row["how"], row["step"]) for row in run.events("recovered")] == [("shrink", 12), ("checkpoint", 13)]
    assert 13 in [row["step"] for row in run.events("checkpoint")]


def test_steps_do_not_wait_until_memory_for_that_checkpoint_is_pinned(start: StartRun) -> None:
    run = start(*SQUARE, *SHRINKS, "checkpoint.every=10")
    run.fake.pinning.add(2)
    trained(run)
    shrunk, repaired = run.events("recovered")
    assert (shrunk["how"], shrunk["step"], repaired["how"]) == ("shrink", 12, "checkpoint")
    assert repaired["step"] <= 10 and len(run.rows()) == 40


@pytest.mark.parametrize(
    ("overrides", "back"),
    [
        (("checkpoint.every_seconds=0",), 0),  # no checkpoints until the end
        (("checkpoint.every=4",), 12),  # the smaller mesh begins with a checkpoint
    ],
)
def test_a_mesh_that_has_shrunk_leaves_no_checkpoint_where_none_is_wanted_or_needed(
    start: StartRun, overrides: tuple[str, ...], back: int
) -> None:
    run = trained(start(*SQUARE, *SHRINKS, *overrides))
    assert 13 not in [row["step"] for row in run.events("checkpoint")]
    assert run.events("recovered")[1]["step"] >= back


@pytest.mark.parametrize(
    ("nodes", "saved"),
    [(("node0", "node1", "node1", "node2"), []), (("node0", "node0", "node1", "node1"), [10, 13])],  # back to 9 and 12
)
def test_copies_on_other_nodes_make_that_checkpoint_needless(
    start: StartRun, nodes: tuple[str, ...], saved: list[int]
) -> None:
    run = trained(start(*SQUARE, *SHRINKS, "elastic.replicate_every=3", "zero.stage=1", nodes=nodes))
    assert [row["how"] for row in run.events("recovered")] == ["shrink", "copies"]
    assert [row["step"] for row in run.events("checkpoint")] == [*saved, 40]
