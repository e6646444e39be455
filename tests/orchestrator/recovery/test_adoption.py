"""A new driver and the ranks that a former one left: which are adopted, from which state, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeRun

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import Superseded
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.worker import RankPlacement, WorkerPlace
from pentad.orchestrator.recovery.adoption import NOWHERE, Parked, can_adopt, membership
from pentad.orchestrator.recovery.fence import RecoveryState, is_recordable
from pentad.orchestrator.recovery.recovery import Recovery
from pentad.orchestrator.run import driver
from pentad.workers.checkpoint.checkpoint import Start
from pentad.workers.runtime.results import EvalResult, Evaluation

pytestmark = pytest.mark.timeout(60)
SMALL = ("model.layers=4", "batch.global_batch_size=8", "schedule.name=1f1b", "run.steps=12")
SQUARE = (*SMALL, "mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
LINE = (*SMALL, "mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")
StartRun = Callable[..., FakeRun]


def placed(rank: int, generation: int = 3, *, bundles: tuple[int, ...] = (1, 0), fits: bool = True) -> RankPlacement:
    return RankPlacement(WorkerPlace("node", "10.0.0.1", -1, 7, ""), generation, rank, bundles, fits, None)


def test_every_rank_that_answers_has_its_place() -> None:
    assert membership({5: placed(1), 6: placed(0)}) == ((1, 0), {0: 6, 1: 5}, (), 3)
    assert membership({5: placed(1)}) == ((1, 0), {1: 5}, (), 3)


def test_ranks_of_two_generations_in_the_same_bundles_belong_together() -> None:
    assert membership({0: placed(0, 4), 1: placed(1, 3)}) == ((1, 0), {0: 0, 1: 1}, (), 4)


def test_a_rank_that_was_replaced_gives_way_to_its_newer_process() -> None:
    assert membership({0: placed(0), 1: placed(1, 2), 2: placed(1, 3)}) == ((1, 0), {0: 0, 1: 2}, (1,), 3)


def test_ranks_in_other_bundles_than_the_newest_and_workers_without_a_rank_are_extra() -> None:
    found = membership({0: placed(0, 4), 1: placed(1, 3, bundles=(0, 1)), 2: placed(-1, 0, bundles=())})
    assert found == ((1, 0), {0: 0}, (1, 2), 4)


def test_no_generation_is_used_twice_even_if_only_a_stranger_knows_of_it() -> None:
    found = membership({0: placed(0, 4), 1: placed(1, 9, fits=False)})
    assert found is not None and (found.generation, found.extra) == (9, (1,))


def test_ranks_of_another_plan_are_not_adopted() -> None:
    assert membership({0: placed(0, fits=False)}) is None and membership({}) is None


@pytest.mark.parametrize(
    ("journal", "rows", "adopts"),
    [
        ([("start", 1.0, "ns/1")], [2.0], True),
        ([("start", 1.0, "ns/1")], [], True),
        ([("start", 1.0, "ns/0"), ("start", 2.0, "ns/1")], [2.0], True),
        ([("start", 1.0, "ns/1"), ("start", 2.0, "ns/0")], [2.0], False),  # those ranks are gone
        ([("start", 1.0, None)], [2.0], False),
        ([], [], False),  # the run's folder was removed
        ([("start", 1.0, "ns/1"), ("rollback", 3.0, "")], [2.0, 4.0], True),
        ([("start", 1.0, "ns/1"), ("rollback", 3.0, "")], [2.0], False),  # perhaps not all ranks have gone back
    ],
)
def test_the_journal_says_whose_ranks_they_are(journal: list[Any], rows: list[float], adopts: bool) -> None:
    events = [{"event": kind, "time": time, "lease": lease} for kind, time, lease in journal]
    assert can_adopt(events, [{"time": time} for time in rows], "ns/1", "rollback") is adopts


def test_ranks_that_have_yet_to_go_back_from_a_spike_are_not_adopted() -> None:
    events = [{"event": "start", "time": 1.0, "lease": "ns/1"}]
    rows = [{"time": 2.0, "skipped": True}]
    assert not can_adopt(events, rows, "ns/1", "rollback") and can_adopt(events, rows, "ns/1", "skip")


def test_a_step_without_results_cannot_be_recorded() -> None:
    state = RecoveryState(version=9, results={7: {0: None}, 8: {1: None}})  # type: ignore[dict-item]
    assert is_recordable(state, 7) and is_recordable(state, 9) and is_recordable(state, 12)
    assert not is_recordable(state, 6)


def adopted(run: FakeRun, *lost: int) -> tuple[Recovery, dict[int, str]]:
    """A new driver's recovery of the run's ranks, and what is wrong with those lost; `lost` ones do not answer."""
    old = run.group
    for rank in lost:
        old.actors[rank].rank.is_alive = False
    group = WorkerGroup(old.plan, old.placement, old.generation, "")
    members = zip(old.actors, old.places, strict=True)
    group.adopt(old.plan, old.bundles, [(None, NOWHERE) if r in lost else each for r, each in enumerate(members)])
    run.group = run.fake.group = group
    run.copies = GroupCopies(group)
    run.recovery = Recovery(run.config, group, run.bus, run.requests, Start(), run.copies)
    return run.recovery, dict.fromkeys(lost, "gone")


@pytest.mark.parametrize("recorded", [5, 7])
def test_a_step_that_the_former_driver_has_not_recorded_counts(start: StartRun, recorded: int) -> None:
    run = start(*SQUARE)
    recovery, lost = adopted(run)
    state = recovery.adopt(lost, recorded)
    assert (state.version, run.group.generation) == (7, 2) and run.versions() == [7] * 4
    assert sorted(state.results)[-2:] == [5, 6]
    (event,) = run.events("recovered")
    assert (event["how"], event["steps_replayed"]) == ("adopt", 0)
    assert run.fake.members() == run.before


def test_the_last_evaluations_of_the_ranks_survive_their_driver(start: StartRun) -> None:
    run = start(*SQUARE)
    evaluations = {step: Evaluation(step, (EvalResult("holdout", 8.0, 8, 1),)) for step in (3, 6)}
    run.before[1].evaluations = [*evaluations.values()]
    recovery, lost = adopted(run)
    assert recovery.adopt(lost, 7).evaluations == evaluations


def test_an_evaluation_of_a_state_that_is_lost_is_not_recorded() -> None:
    """The run goes back to before it, and evaluates again."""
    evaluations = {step: Evaluation(step, (EvalResult("holdout", 8.0, 8, 1),)) for step in (6, 8)}
    recorded = list[dict[int, Evaluation]]()
    steps: Any = SimpleNamespace(done=9, add=lambda results, evaluations: recorded.append(evaluations))
    driver._record_surviving(steps, RecoveryState(version=6, evaluations=evaluations))
    assert recorded == [{6: evaluations[6]}]


@pytest.mark.parametrize(("mesh", "how", "version"), [(SQUARE, "repair", 7), (LINE, "checkpoint", 5)])
def test_a_rank_that_died_with_the_driver_is_replaced(
    start: StartRun, mesh: tuple[str, ...], how: str, version: int
) -> None:
    run = start(*mesh)
    run.save(5)
    recovery, lost = adopted(run, 2)
    state = recovery.adopt(lost, 7)
    assert (run.events("recovered")[0]["how"], state.version) == (how, version)
    assert run.versions() == [version] * 4
    assert [(row["rank"], row["detector"]) for row in run.events("lost")] == [(2, "adoption")]


def test_steps_that_no_rank_has_results_of_run_again(start: StartRun) -> None:
    run = start(*SQUARE)
    run.save(3)
    for rank in run.before:
        rank.results = rank.results[-2:]
    recovery, lost = adopted(run)
    state = recovery.adopt(lost, 4)  # no rank has the results of step 4 any more
    assert state.version == 3 and run.versions() == [3] * 4


def test_a_rank_that_dies_during_the_adoption_is_replaced(start: StartRun) -> None:
    run = start(*SQUARE)
    recovery, lost = adopted(run)

    def strike(rank: Any, method: str) -> None:
        if method == "connect" and rank is run.before[1]:
            rank.is_alive = False

    run.fake.on_call = strike
    state = recovery.adopt(lost, 7)
    assert state.version == 7 and run.versions() == [7] * 4
    assert run.events("recovered")[0]["how"] == "repair"


def test_no_rank_takes_a_step_whose_norm_nobody_knows_any_more(start: StartRun) -> None:
    """A former driver died while it started a generation: ranks 0 to 2 have taken the step, rank 3 has not."""
    run = start(*SQUARE)
    for rank in run.before:
        rank.version, rank.losses = (8, ()) if rank.number in (0, 1, 2) else (7, (1.0,))
        rank.results.append(replace(rank.results[-1], step=7))
    run.before[3].ready = True
    recovery, lost = adopted(run)
    state = recovery.adopt(lost, 7)
    assert (state.version, state.current) == (8, (0, 1, 2)) and run.versions() == [8] * 4


def test_a_former_driver_that_wakes_up_leaves_everything_alone(start: StartRun) -> None:
    run = start(*SQUARE)
    former, group = run.recovery, run.group
    recovery, lost = adopted(run)
    recovery.adopt(lost, 7)
    members, generation = run.fake.members(), run.group.generation
    with pytest.raises(Superseded, match="another driver has taken over"):
        former.recover(run.lose_nobody(group), 7)
    assert all(rank.is_alive and rank.generation == generation for rank in members)
    assert not run.fake.killed


def test_an_adopted_run_continues_to_its_end(start: StartRun) -> None:
    run = start(*SQUARE)
    run.bus.update(step=0)
    adopted(run)
    parked = Parked(run.group, run.group.plan, {}, None)
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start(), parked) == 12
    assert [row["how"] for row in run.events("recovered")] == ["adopt"]
    rows = [row["step"] for row in run.rows()]
    assert rows == list(range(12))


def test_a_group_whose_lease_is_lost_neither_waits_for_its_ranks_nor_ends_them(start: StartRun) -> None:
    run = start(*SQUARE)

    def lost() -> None:
        raise Superseded("another driver commands them")

    run.group.lease = SimpleNamespace(require=lost, is_lost=lambda: True)  # type: ignore[assignment]
    with pytest.raises(Superseded):
        run.group.ping()
    run.group.stop(kill=True)
    assert all(rank.is_alive for rank in run.before)
