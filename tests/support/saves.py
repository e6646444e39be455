"""Checkpoints of rank processes, saved at rest and while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bits import same_bits
from resume import commit
from worker_processes import WorkerProcess, call_all, losses_and_state, start_run

from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.shards import read

Order = tuple[Any, ...]  # a method of a Runner and its arguments


def tensors_of(folder: Location) -> dict[str, torch.Tensor]:
    found = checkpoint.open_checkpoint(folder)
    return read(found, found.tensors)


def saved_at_rest(workers: list[WorkerProcess], plan: Plan, root: Path, *steps: int) -> tuple[dict, dict]:
    """Saves after each of these steps, which are closed; returns the losses and the final state."""
    start_run(workers, plan)
    done, first = [], 0
    for step in steps:
        done += call_all(workers, "run", first, step - first)
        folder, first = checkpoint.folder_of(root, step), step
        commit(folder, step, [entry for its in call_all(workers, "save", str(folder), step) for entry in its])
    found = losses_and_state(workers, done, 0)
    call_all(workers, "close")
    return found


def written(workers: list[WorkerProcess], folder: Path, step: int) -> list[tuple[WorkerProcess, int]]:
    """Starts writing every rank's snapshot of this many steps in the background."""
    return [(worker, worker.call_beside("write", str(folder), step)) for worker in workers]


def committed(asked: list[tuple[WorkerProcess, int]], folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Commits what `written` has started; returns the tensors."""
    commit(folder, step, [entry for worker, number in asked for entry in worker.answer(number).entries])
    return tensors_of(folder)


def assert_saved_beside_training(ranks: list[WorkerProcess], plan: Plan, root: Path) -> None:
    """Asserts that checkpoints of steps 3 and 5, copied and written while the next steps run, and of step 8, the last
    one, have the bits of checkpoints at rest, and that the run has those of one without checkpoints."""
    expected = saved_at_rest(ranks, plan, root / "rest", 3, 5, 8)
    start_run(ranks, plan)
    folders = {step: checkpoint.folder_of(root / "beside", step) for step in (3, 5, 8)}
    calls: list[Order] = [("run", 0, 3, True), ("snapshot", 3), ("run", 3, 2, True)]
    asked = [[worker.call(*call) for call in calls] for worker in ranks]
    found = {3: committed(written(ranks, folders[3], 3), folders[3], 3)}
    calls = [("snapshot", 5), ("run", 5, 0, False), ("run", 5, 3, True), ("snapshot", 8), ("run", 8, 0, False)]
    writing = written(ranks, folders[5], 5)
    later = [[worker.call(*call) for call in calls[:3]] for worker in ranks]
    found[5] = committed(writing, folders[5], 5)
    last = [[worker.call(*call) for call in calls[3:]] for worker in ranks]
    found[8] = committed(written(ranks, folders[8], 8), folders[8], 8)
    answers = [
        [result for number in its if (part := worker.answer(number)) for result in part]
        for worker, *numbers in zip(ranks, asked, later, last, strict=True)
        for its in numbers
    ]
    losses, state = losses_and_state(ranks, answers, 0)
    call_all(ranks, "close")
    assert losses == expected[0]
    assert same_bits(state, expected[1])
    for step, tensors in found.items():
        assert same_bits(tensors, tensors_of(checkpoint.folder_of(root / "rest", step))), step
    names = [name for name in found[3] if name.startswith("model.")]
    assert any(not torch.equal(found[3][name], found[5][name]) for name in names), "the steps changed nothing"
