"""Runs of `fake_ray` that recover: their meshes, and what happens to their ranks."""

from __future__ import annotations

from collections.abc import Callable

from fake_ray import FakeRun, Rank
from small_checkpoint import FILE

from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run import driver
from pentad.workers.checkpoint.checkpoint import Start

SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # the state of a rank is nowhere else
SAVES = (*LINE, "checkpoint.every=4", "checkpoint.every_seconds=0")
SHRINKS = ("elastic.min_ranks=2", "elastic.wait_seconds=1")
StartRun = Callable[..., FakeRun]


def damage(run: FakeRun, step: int) -> None:
    path = run.folder.path / "checkpoints" / f"step-{step:08d}" / FILE
    path.write_bytes(bytes(path.stat().st_size))


def once(method: str, number: int, do: Callable[[Rank], None]) -> Callable[[Rank, str], None]:
    """Calls `do` on a rank at its first call of a method."""
    done: list[str] = []

    def on_call(rank: Rank, name: str) -> None:
        if (name, rank.number) == (method, number) and not done:
            done.append(name)
            do(rank)

    return on_call


def die(rank: Rank) -> None:
    rank.is_alive = False


def drive(run: FakeRun) -> list[tuple[str, int]]:
    """Runs all steps; returns the events of checkpoints and recoveries."""
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == run.config.run.steps
    assert [row["step"] for row in run.rows()] == list(range(run.config.run.steps))
    kinds = ("checkpoint", "checkpoint failed", "recovered")
    events = read_lines(run.folder.path / "journal.jsonl")
    return [(row["event"], row["step"]) for row in events if row["event"] in kinds]
