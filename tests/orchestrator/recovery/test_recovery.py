"""Recovery on ranks that live in this process (`fake_ray`): replace, shrink, grow, restore, and give up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRun, Rank
from small_checkpoint import FILE

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery.fence import CannotRecover, RecoveryState, is_complete
from pentad.orchestrator.recovery.recovery import ATTEMPTS, CHECK_SECONDS
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

SMALL = ("model.layers=4", "batch.global_batch_size=8", "schedule.name=1f1b", "cluster.start_timeout_seconds=100")
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # no rank's state is anywhere else
SHRINKS = ("elastic.min_ranks=2", "elastic.wait_seconds=1")


StartRun = Callable[..., FakeRun]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1), (0, 3), (1, 2)])
def test_lost_ranks_are_replaced_without_losing_a_step_while_replicas_survive(
    start: StartRun, ranks: tuple[int, ...], device: str
) -> None:
    run = start(*SQUARE, device=device)
    has_state = {rank // 2 for rank in range(4) if rank not in ranks} == {0, 1}  # of both stages
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
    assert not run.before[2].is_alive  # which was the only one with its stage, and is no rank any more


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


def damage(run: FakeRun, step: int) -> None:
    path = run.folder.path / "checkpoints" / f"step-{step:08d}" / FILE
    path.write_bytes(bytes(path.stat().st_size))


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


def test_a_recovery_goes_back_past_damaged_checkpoints_but_never_to_the_start(start: StartRun) -> None:
    run = start(*LINE)
    for step in (3, 5):
        run.save(step)
    damage(run, 5)
    assert run.recovery.recover(run.lose(1), 7).version == 3 and run.folder.saved() == [3]
    damage(run, 3)
    with pytest.raises(PentadError, match=r"no checkpoint in .* is intact"):
        run.recovery.recover(run.lose(1), 7)


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
    """Even by a process that is no rank of the smaller mesh."""
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


def shrunk(start: StartRun) -> FakeRun:
    """A run that has lost node1 and shrunk; the node is there again."""
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


def once(method: str, number: int, do: Callable[[Rank], None]) -> Callable[[Rank, str], None]:
    """Does something to a rank at its first call of a method."""
    done: list[str] = []

    def on_call(rank: Rank, name: str) -> None:
        if (name, rank.number) == (method, number) and not done:
            done.append(name)
            do(rank)

    return on_call


def die(rank: Rank) -> None:
    rank.is_alive = False


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


def test_no_rank_left_ends_the_run_at_once(start: StartRun) -> None:
    run = start(*SQUARE)
    with pytest.raises(CannotRecover, match=r"; no rank is left of the run; the same command resumes from the newest"):
        run.recovery.recover(run.lose(0, 1, 2, 3), 7)
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
        if run.fake.now > gone:  # and another node takes its place: longer than elastic.wait_seconds
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
    """One or two ranks die, then a node, which returns, and then one of the ranks that are left; one dies in an
    evaluation; with checkpoints or without."""
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
