"""The simulator finds bugs in a driver: for each one here, some seed finds it, and is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos_history
import pytest
from chaos_history import Simulation, play
from chaos_scenario import Fault, Scenario, scenario

from pentad.orchestrator.cluster import copies
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.lease import Lease
from pentad.orchestrator.cluster.worker import Worker
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.recovery import fence, newest_checkpoint, regroup
from pentad.orchestrator.run import driver, step_loop
from pentad.workers.abort import Fence
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.checksums import CheckedFile, Damaged

Patch = pytest.MonkeyPatch
SEEDS = range(300)
BEFORE_IT_HEARS = (Fault("driver killed", "before F", 3, 0),)  # of the evaluation after three steps


def no_fence(patch: Patch) -> None:
    """Ranks are not told that their generation is over."""
    call = fence._call_living

    def without(group: Any, lost: Any, method: str, *rest: Any) -> Any:
        return {} if method == "fence" else call(group, lost, method, *rest)

    patch.setattr(fence, "_call_living", without)


def same_generation(patch: Patch) -> None:
    """A command begins with the generation of the one before it."""
    resume = driver._resume

    def repeated(*arguments: Any) -> driver.Beginning:
        began = resume(*arguments)
        return began._replace(facts=began.facts | {"generation": max(1, began.facts["generation"] - 1)})

    patch.setattr(driver, "_resume", repeated)


def stale_calls(patch: Patch) -> None:
    """Ranks accept calls of earlier generations, and end no generation."""
    patch.setattr(Worker, "fence", lambda worker, generation: None)


def forgotten_rewind(patch: Patch) -> None:
    """Steps that run again stay in the records."""
    patch.setattr(chaos_history, "real_rewind", lambda bus, step: None)


def committed_twice(patch: Patch) -> None:
    """The results of steps are recorded twice."""
    done = EventBus.steps_done

    def twice(bus: EventBus, rows: Any, spans: Any) -> None:
        done(bus, rows, spans)
        done(bus, rows, spans)

    patch.setattr(EventBus, "steps_done", twice)


def lost_results(patch: Patch) -> None:
    """What survivors know of completed steps is forgotten."""
    patch.setattr(step_loop.StepLoop, "add", lambda loop, steps, evaluations: None)


def lost_evaluations(patch: Patch) -> None:
    """What survivors know of an evaluation is forgotten."""
    add = step_loop.StepLoop.add
    patch.setattr(step_loop.StepLoop, "add", lambda loop, steps, evaluations: add(loop, steps, {}))


def evaluated_twice(patch: Patch) -> None:
    """The driver does not check which evaluations are recorded."""
    patch.setattr(step_loop, "newest_evaluation", lambda rows: -1)


def any_source(patch: Patch) -> None:
    """A rank without the newest state sends it."""
    patch.setattr(regroup, "is_complete", lambda plan, state: True)


def unfinished_copy(patch: Patch) -> None:
    """A copy counts before its parts are in place."""
    submit = copies.GroupCopies.submit

    def early(group: copies.GroupCopies, step: int) -> Any:
        refs = submit(group, step)
        group.commit(step)
        return refs

    patch.setattr(copies.GroupCopies, "submit", early)


def no_copies_found(patch: Patch) -> None:
    """A recovery does not look for copies in memory."""
    patch.setattr(regroup.Regroup, "_find_copy", lambda self, state: None)


def older_checkpoint(patch: Patch) -> None:
    """A recovery reads the oldest checkpoint that is intact."""
    recover = newest_checkpoint.recover

    def older(root: Any, *options: Any) -> checkpoint.NewestCheckpoint:
        found = recover(root, *options)
        oldest = next(iter(checkpoint.complete_folders(root).values()), None)
        return found if oldest is None else found._replace(checkpoint=checkpoint.open_checkpoint(oldest))

    patch.setattr(newest_checkpoint, "recover", older)


def nothing_handed_over(patch: Patch) -> None:
    """A mesh that shrinks does not take its state along."""
    patch.setattr(regroup.Regroup, "_moving", lambda self, state: None)


def unsaved_end(patch: Patch) -> None:
    """A run ends without its last checkpoint."""
    patch.setattr(step_loop.StepLoop, "_save_due", lambda loop, step: False)


def no_hangs(patch: Patch) -> None:
    """The driver does not check whether ranks make progress."""
    patch.setattr(step_loop.StepLoop, "_tick", lambda loop, statuses, *, stepping=False: None)


def processes_left(patch: Patch) -> None:
    """A run ends and leaves its ranks behind."""
    patch.setattr(WorkerGroup, "stop", lambda group, *, kill=False: None)


def late_publishing(patch: Patch) -> None:
    """The files of a checkpoint are written, and it is committed, in a generation that is over."""
    patch.setattr(Fence, "check", lambda self: None)


def damage_ignored(patch: Patch) -> None:
    """Ranks do not compare what they read."""
    fill = CheckedFile._fill

    def unchecked(file: CheckedFile, block: int, target: memoryview) -> None:
        with suppress(Damaged):
            fill(file, block, target)

    patch.setattr(CheckedFile, "_fill", unchecked)


def damage_taken_for_intact(patch: Patch) -> None:
    """The driver does not believe ranks that find a checkpoint damaged."""
    patch.setattr(newest_checkpoint.NewestIntact, "is_intact", lambda newest, folder: True)


def endless_lease(patch: Patch) -> None:
    """Ranks wait forever for another driver."""
    patch.setattr(Lease, "is_expired", lambda lease, now: False)


DEFECTS: tuple[Callable[[Patch], None], ...] = (
    *(no_fence, same_generation, stale_calls, forgotten_rewind, committed_twice, lost_results, any_source),
    *(lost_evaluations, evaluated_twice),
    *(unfinished_copy, no_copies_found, unsaved_end, no_hangs, processes_left, late_publishing, damage_ignored),
    *(endless_lease, older_checkpoint, damage_taken_for_intact, nothing_handed_over),
)
# Of random faults fewer than one in a thousand finds the defect.
AIMED: dict[Callable[[Patch], None], tuple[Fault, ...]] = {lost_evaluations: BEFORE_IT_HEARS}
QUICK = (  # by one of the first seeds
    *(no_fence, same_generation, forgotten_rewind, committed_twice, unfinished_copy, lost_evaluations),
)


@pytest.mark.parametrize("defect", QUICK, ids=lambda defect: defect.__name__)
def test_a_defect_of_the_driver_is_found(
    defect: Callable[[Patch], None], memory: Path, current: list[Simulation], monkeypatch: Patch
) -> None:
    find(defect, memory, current, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [each for each in DEFECTS if each not in QUICK], ids=lambda defect: defect.__name__)
def test_every_defect_of_the_driver_is_found(
    defect: Callable[[Patch], None], memory: Path, current: list[Simulation], monkeypatch: Patch
) -> None:
    find(defect, memory, current, monkeypatch)


def aimed(seed: int, faults: tuple[Fault, ...] | None) -> Scenario:
    """The scenario of a seed, with these faults instead if there are any."""
    return scenario(seed) if faults is None else replace(scenario(seed), faults=faults)


def find(defect: Callable[[Patch], None], memory: Path, current: list[Simulation], patch: Patch) -> None:
    defect(patch)
    for seed in SEEDS:
        try:
            play(aimed(seed, AIMED.get(defect)), memory, current)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"no seed of {SEEDS} finds it")


@pytest.mark.parametrize("faults", AIMED.values(), ids=[defect.__name__ for defect in AIMED])
def test_a_history_that_finds_a_defect_holds_without_it(
    faults: tuple[Fault, ...], memory: Path, current: list[Simulation]
) -> None:
    for seed in range(8):
        play(aimed(seed, faults), memory, current)
