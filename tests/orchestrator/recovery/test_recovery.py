"""Recovery on ranks in this process (`fake_ray`): replace, shrink, grow, restore, and give up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_rank
import pytest
from fake_ray import Rank
from recovery_runs import LINE, SHRINKS, SQUARE, StartRun, damage, die, once

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery import fence
from pentad.orchestrator.recovery.fence import CannotRecover, RecoveryState, is_complete
from pentad.orchestrator.recovery.recovery import ATTEMPTS, CHECK_SECONDS
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.measure import History
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start, set_aside
from pentad.workers.checkpoint.checksums import Damaged

SMALL = ("model.layers=4", "batch.global_batch_size=8", "schedule.name=1f1b", "cluster.start_timeout_seconds=100")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1), (0, 3), (1, 2)])
def test_lost_ranks_are_replaced_without_losing_a_step_while_replicas_survive(
    start: StartRun, ranks: tuple[int, ...], device: str
) -> None:
    run = start(*SQUARE, device=device)
    has_state = {rank // 2 for rank in range(4) if rank not in ranks} == {0, 1}  # both stages have one
    state = run.recovery.recover(run.lose(*ranks), 7)
    how = run.events("recovered")[0]["how"]
    assert (how, state.version) == (("repair", 7) if has_state else ("checkpoint", 0))
    assert run.versions() == [state.version] * 4
    assert run.group.generation == 2
    assert [rank for rank in range(4) if run.fake.members()[rank] is not run.before[rank]] == list(ranks)
    assert [row["rank"] for row in run.events("lost")] == list(ranks)
    assert [row["step"] for row in run.events("fence")] == [7]
    assert set(state.results[6]) == set(range(4)) - set(ranks)


def test_a_step_that_one_rank_has_taken_counts_on_all(start: StartRun) -> None:
    run = start(*SQUARE)
    run.before[3].version += 1
    for rank in run.before[:2]:
        rank.ready = True
    state = run.recovery.recover(run.lose(2), 7)
    assert (state.version, state.current) == (8, (0, 1, 3))
    assert run.versions() == [8] * 4


def test_a_rank_that_is_behind_gets_the_newest_state(start: StartRun) -> None:
    run = start(*SQUARE)
    run.before[3].version += 1  # and its replica, rank 1, cannot follow
    run.before[0].ready = True
    state = run.recovery.recover(run.lose(2), 7)
    assert (state.version, state.current) == (8, (0, 3))
    assert run.versions() == [8] * 4


def test_ranks_without_state_are_not_a_source() -> None:
    plan = make_plan(load(None, [*SMALL, *SQUARE]), "cpu")
    assert is_complete(plan, RecoveryState(0, (0, 1, 2, 3)))
    assert is_complete(plan, RecoveryState(7, (0, 3)))
    assert not is_complete(plan, RecoveryState(7, (0, 1)))
    assert not is_complete(plan, RecoveryState(-1, (0, 1, 2, 3)))


@pytest.mark.parametrize("saved", [0, 5])
@pytest.mark.parametrize("overrides", [LINE, (*SQUARE, "zero.stage=3")])
def test_state_that_only_the_lost_rank_held_is_restored_from_the_newest_checkpoint(
    start: StartRun, overrides: tuple[str, ...], saved: int
) -> None:
    run = start(*overrides)
    if saved:
        run.save(saved)
    state = run.recovery.recover(run.lose(1), 7)
    (recovered,) = run.events("recovered")
    assert (recovered["how"], recovered["step"], recovered["steps_replayed"]) == ("checkpoint", saved, 7 - saved)
    assert recovered["seconds"].keys() == {"detect", "fence", "place", "load", "connect", "state"}
    assert state.version == saved and run.versions() == [saved] * 4


def test_a_recovery_goes_back_past_damaged_checkpoints_but_never_to_the_start(start: StartRun) -> None:
    run = start(*LINE)
    for step in (3, 5):
        run.save(step)
    damage(run, 5)
    assert run.recovery.recover(run.lose(1), 7).version == 3 and run.folder.saved() == [3]
    damage(run, 3)
    with pytest.raises(PentadError, match=r"no checkpoint in .* is intact"):
        run.recovery.recover(run.lose(1), 7)


def test_nor_does_one_whose_checkpoints_are_gone(start: StartRun) -> None:
    run = start(*LINE)
    run.save(3)
    run.bus.record("checkpoint", generation=1, step=3)
    Path(str(run.folder.checkpoints)).rename(run.folder.path / "away")
    with pytest.raises(PentadError, match=r"has no checkpoint, but the run has committed that of 3 steps: expected"):
        run.recovery.recover(run.lose(1), 7)


def test_nor_does_one_whose_damaged_checkpoints_were_renamed_before(start: StartRun) -> None:
    """For example, while there were still copies in memory to go back to."""
    run = start(*LINE)
    run.save(3)
    run.bus.record("checkpoint", generation=1, step=3)
    set_aside(run.folder.checkpoint(3))
    with pytest.raises(
        PentadError, match=r"^no checkpoint in .* is intact, and the damaged ones are renamed: expected"
    ):
        run.recovery.recover(run.lose(1), 7)


@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_that_commits_a_checkpoint_is_fenced_once_it_has(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """However slow the storage is: else it would be taken for lost."""
    run, wait, waited, commit = start(*SQUARE), fence.ray.wait, list[tuple[int, float]](), object()
    run.group.storing = {0: commit}

    def recorded(refs: list[object], **given: float) -> object:
        if refs != [commit]:
            return wait(refs, **given)
        waited.append((run.group.generation, given["timeout"]))
        return [], refs

    monkeypatch.setattr(fence.ray, "wait", recorded)
    run.recovery.recover(run.lose(lost), 7)
    assert waited == ([(1, fence.STORING_SECONDS)] if lost else [])


def test_a_mesh_that_may_not_shrink_ends_the_run_and_keeps_the_group(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.wait_seconds=1")
    plan, fault = run.group.plan, run.lose(3, 1)
    run.fake.lose_node("node1")
    expected = (
        "rank 3 died; no node with room for it joined within elastic.wait_seconds = 1, and 2 ranks make no mesh of "
        "elastic.min_ranks = 4 or more"
    )
    with pytest.raises(CannotRecover) as caught:
        run.recovery.recover(fault, 7)
    assert str(caught.value) == expected
    assert run.group.plan is plan and run.fake.members() == run.before
    with pytest.raises(CannotRecover):
        run.recovery.recover(caught.value, 7)  # at once: nothing has changed
    assert run.group.generation == 2


def test_a_stop_ends_the_wait_for_a_node(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.wait_seconds=100")
    fault, run.fake.on_sleep = run.lose(3), run.requests.stop
    run.fake.lost_nodes.add("node1")
    began = run.fake.now
    with pytest.raises(CannotRecover, match=r"^the run was asked to stop while it waited for a node to join$"):
        run.recovery.recover(fault, 7)
    assert run.fake.now < began + 5


def hang(rank: Rank) -> None:
    rank.hangs = True


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("method", ["fence", "leave", "start", "connect", "receive"])
@pytest.mark.parametrize("what", [die, hang])
def test_a_fault_during_a_recovery_is_recovered_with_it(
    start: StartRun, what: Callable[[Rank], None], method: str, number: int
) -> None:
    run = start(*SQUARE)
    run.save(5)
    run.fake.on_call = once(method, number, what)
    state = run.recovery.recover(run.lose(3), 7)
    (recovered,) = run.events("recovered")
    has_replica = number != 2  # rank 2 is rank 3's
    assert (recovered["how"], state.version) == (("repair", 7) if has_replica else ("checkpoint", 5))
    assert run.versions() == [state.version] * 4
    assert {row["rank"] for row in run.events("lost")} == {3, number}
    assert run.group.generation == 1 + len(run.events("fence"))
    assert run.before[number].pid in run.fake.killed


def test_a_recovery_that_fails_again_and_again_is_given_up(start: StartRun) -> None:
    run = start(*SQUARE)
    run.fake.on_call = lambda rank, method: run.fake.kill(rank.pid) if (method, rank.number) == ("connect", 2) else None
    with pytest.raises(WorkerError, match=r"^rank 2 .* died"):
        run.recovery.recover(run.lose(3), 7)
    assert len(run.events("fence")) == ATTEMPTS and not run.events("recovered")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("saved", [0, 5])
@pytest.mark.parametrize("overrides", [SQUARE, LINE])
def test_if_all_ranks_are_lost_new_ones_go_back_to_the_newest_checkpoint(
    start: StartRun, overrides: tuple[str, ...], saved: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = start(*overrides, device=device), list[str]()
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    if saved:
        run.save(saved)
    ranks = range(len(run.before))
    state = run.recovery.recover(run.lose(*ranks), 7)
    (recovered,) = run.events("recovered")
    assert (recovered["how"], state.version) == ("checkpoint", saved)
    assert run.versions() == [saved] * len(ranks) and not state.current
    assert not {id(rank) for rank in run.before} & {id(rank) for rank in run.fake.members()}
    assert [row["rank"] for row in run.events("lost")] == list(ranks)
    assert ("there is no checkpoint: back to what the run started from" in notes) is (saved == 0)


def test_all_ranks_lost_before_a_step_is_complete_end_the_run_at_once(start: StartRun) -> None:
    run = start(*SQUARE)
    with pytest.raises(CannotRecover, match=r"^rank 0 died; all ranks were lost before a step was complete$"):
        run.recovery.recover(run.lose(0, 1, 2, 3), 0)
    assert run.group.generation == 2  # one attempt


def test_a_mistake_found_during_a_recovery_ends_the_run(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(*SQUARE)

    def receive(*_: Any) -> None:
        raise PentadError("the disk is full")

    monkeypatch.setattr(Rank, "receive", receive)
    with pytest.raises(PentadError, match=r"^the disk is full$") as caught:
        run.recovery.recover(run.lose(3), 7)
    assert not isinstance(caught.value, WorkerError)


def test_faults_without_progress_end_the_run(start: StartRun) -> None:
    run = start(*SQUARE)
    for done in (7, 7, 7, 8, 8, 8):
        run.recovery.recover(run.lose(3), done)
    with pytest.raises(WorkerError, match=r"^rank 3 died$"):
        run.recovery.recover(run.lose(3), 8)
    assert len(run.events("recovered")) == 6


def test_max_failures_ends_the_run(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.max_failures=1")
    run.recovery.recover(run.lose(3), 7)
    with pytest.raises(WorkerError, match=r"^rank 3 died$"):
        run.recovery.recover(run.lose(3), 8)


def test_a_draining_node_is_left_shortly_before_it_goes_and_is_no_failure(start: StartRun) -> None:
    run = start(*SQUARE, "elastic.max_failures=0", "elastic.wait_seconds=1")
    run.fake.draining = {"node1": int(1000 * (run.fake.now + 20)), "elsewhere": 1}
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) is None
    run.fake.now += 5
    assert run.recovery.should_regroup({}) is not None
    gone = run.fake.now + 13

    def on_sleep() -> None:
        if run.fake.now > gone:  # later than elastic.wait_seconds, another node takes its place
            run.fake.draining = {}

    run.fake.on_sleep = on_sleep
    leaving = [rank for rank in range(4) if run.before[rank].node == "node1"]
    state = run.recovery.regroup(7)
    assert {(row["rank"], row["fault"], row["detector"]) for row in run.events("lost")} == {
        (rank, "drain", "notice") for rank in leaving
    }
    assert run.events("recovered")[0]["how"] in ("repair", "checkpoint") and run.versions() == [state.version] * 4
    run.fake.now += CHECK_SECONDS
    assert run.recovery.should_regroup({}) is None


def test_a_rank_that_hangs_is_reported_and_replaced(start: StartRun) -> None:
    run = start(*SQUARE)
    run.group.restore(Start())
    run.fake.on_call = once("run", 2, hang)
    verdicts = []
    run.bus.update = lambda **changes: verdicts.append(changes.get("verdict"))  # type: ignore[method-assign]
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    (lost,) = run.events("lost")
    assert (lost["rank"], lost["fault"], lost["detector"]) == (2, "hang", "heartbeat")
    assert lost["cause"].startswith("no rank made progress for ") and any(verdicts)
    assert [row["how"] for row in run.events("recovered")] == ["repair"]


def test_an_abort_ends_the_run_during_a_step(start: StartRun) -> None:
    run = start(*SQUARE)
    run.group.restore(Start())
    run.fake.on_call = once("run", 0, lambda rank: run.requests.abort())
    with pytest.raises(PentadError, match=r"^the run was aborted through its control service, without a checkpoint$"):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert not run.events("checkpoint")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mesh", [SQUARE, LINE, (*LINE, "elastic.replicate_every=3")])
def test_every_step_is_recorded_once_whatever_dies(start: StartRun, mesh: tuple[str, ...], seed: int) -> None:
    """One or two ranks die, then a node, which returns, and then one of the remaining ranks; one dies in an evaluation;
    with and without checkpoints."""
    run = start(*mesh, *SHRINKS, f"checkpoint.every={5 * (seed % 3)}", "data.holdout=0.1", "eval.every=4")
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(8, 30), 4))
    run.fake.faults = {step: rng.choice([(0,), (1,)]) for step in steps}
    run.fake.faults |= {steps[0]: rng.choice([(0, 1), (2, 3), (3,)]), steps[1]: "node1"}
    run.fake.returns = {rng.randrange(steps[1] + 1, 31)}
    run.fake.commits = {step for step in steps if rng.random() < 0.5}
    run.fake.eval_faults = {rng.choice([8, 24, 36]): (rng.randrange(2),)}
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    assert [row["step"] for row in read_lines(run.folder.path / "metrics.jsonl")] == list(range(run.config.run.steps))
    assert [row["step"] for row in run.folder.evaluations()] == list(range(4, run.config.run.steps + 1, 4))
    assert not run.fake.faults and not run.fake.eval_faults
    assert run.versions() == [run.config.run.steps] * len(run.fake.members())
    recovered = run.events("recovered")
    assert {"shrink", "grow"} <= {row["how"] for row in recovered}
    generations = [row["generation"] for row in recovered]
    assert generations == sorted(set(generations))
    assert not any(row["steps_replayed"] for row in recovered if row["how"] in ("repair", "grow"))


def test_a_rank_that_alone_finds_a_checkpoint_damaged_ends_the_run_and_no_checkpoint_is_given_up(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(*LINE)
    for step in (3, 5):
        run.save(step)
    monkeypatch.setattr(
        fake_rank, "problem_of", lambda folder: Damaged("stage-000.safetensors: CRC-32 is 1, expected 2")
    )
    with pytest.raises(PentadError, match=r"CRC-32 is 1, expected 2, but the driver finds .*step-00000005 intact: "):
        run.recovery.recover(run.lose(1), 7)
    assert run.folder.saved() == [3, 5] and not run.events("checkpoint refused")


def test_a_checkpoint_that_storage_never_gives_ends_the_run(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(folder: object) -> None:
        raise fake_rank.Hangs

    run = start(*LINE, "checkpoint.hang_seconds=120")
    run.save(5)
    monkeypatch.setattr(fake_rank, "problem_of", hangs)
    fault, began = run.lose(1), run.fake.now
    with pytest.raises(PentadError, match=r"checkpoints stood still for 120 s: expected an answer"):
        run.recovery.recover(fault, 7)
    assert 120 < run.fake.now - began < 130


def test_the_timelines_of_a_generation_are_drawn_beside_the_next_one(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, goes_on, drawn = start(*SQUARE, "run.steps=20", "eval.every=0"), threading.Event(), list[int]()
    run.fake.on_call = lambda rank, method: goes_on.set() if 15 in run.fake.trained else None

    def draw(bus: object, history: History) -> None:
        assert goes_on.wait(30), "the next generation waits"
        drawn.append(history.generation)

    monkeypatch.setattr(driver, "_write_timelines", draw)
    run.fake.faults = {10: (2,)}
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 20
    assert drawn == [1, 2]
