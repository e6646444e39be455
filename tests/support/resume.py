"""Runs that stop at a checkpoint and resume from it."""

from __future__ import annotations

from pathlib import Path

from bits import same_bits

from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard


def run_and_save(fleet, plan, steps: int, folder: Path) -> list:
    """Runs the first steps of a plan and commits a checkpoint of them."""
    outcomes = fleet.run(plan, [(0, steps)], save=str(folder))
    commit(folder, steps, [entry for outcome in outcomes for entry in outcome.shards])
    return outcomes


def commit(folder: Path, step: int, entries: list[dict]) -> None:
    checkpoint.commit(folder, step=step, shards=[Shard.from_plain(entry) for entry in entries], meta={})


def save_and_resume(fleet, plan, folder: Path, step: int, calls, *, before=None) -> list:
    """Saves a plan's state at a step and resumes from it; `before`, if given, is the plan used until the save."""
    run_and_save(fleet, before or plan, step, folder)
    return fleet.run(plan, calls, restore=str(folder))


def assert_repeatable(fleet, plan, tmp_path: Path) -> None:
    """Asserts that four steps have the same bits in one call, in three, and after a stop in the middle."""
    once = fleet.run(plan, [(0, 4)])
    again = fleet.run(plan, [(0, 1), (1, 2), (3, 1)])
    resumed = save_and_resume(fleet, plan, checkpoint.folder_of(tmp_path, 2), 2, [(2, 2)])
    for a, b, c in zip(once, again, resumed, strict=True):
        assert same_bits(a.state, b.state)
        assert same_bits(a.state, c.state)
        results = [(r.losses, r.grad_norm) for r in a.results]
        assert results == [(r.losses, r.grad_norm) for r in b.results]
        assert results[2:] == [(r.losses, r.grad_norm) for r in c.results]
