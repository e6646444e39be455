"""Storage that hangs costs checkpoints, but no step; on ranks in this process (`fake_ray`)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from fake_rank import STEP_SECONDS, Rank
from fake_ray import FakeRun
from recovery_runs import SAVES, drive

from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.records import run_files
from pentad.orchestrator.recovery import newest_checkpoint, retention
from pentad.orchestrator.run import driver, saving
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Unreadable
from pentad.workers.checkpoint.checksums import activity

HANGS = (*SAVES, "checkpoint.hang_seconds=5")


def test_a_write_that_never_returns_costs_checkpoints_and_no_step(start: Callable[..., FakeRun]) -> None:
    """Training waits for it once, at the next checkpoint by steps; the end of the run does not wait again."""
    run = start(*HANGS, "run.steps=24")
    run.fake.writing, began = (8, 2), run.fake.now
    with pytest.raises(PentadError, match=r"^the last state, after step 24, was not saved: .* has taken nothing for"):
        drive(run)
    assert [row["step"] for row in run.rows()] == list(range(24))
    assert run.fake.now - began < 24 * STEP_SECONDS + 5 + 5
    failed = {row["step"]: row["error"] for row in run.events("checkpoint failed")}
    assert [*failed] == [8, 12, 16, 20] and run.folder.saved() == [4]
    assert "has taken nothing for checkpoint.hang_seconds = 5" in failed[8] and run.fake.given_up == {8}
    assert {failed[step] for step in (12, 16, 20)} == {"that of step 8 still hangs"}


def test_a_write_that_returns_late_commits_nothing_and_the_next_checkpoint_is_saved(
    start: Callable[..., FakeRun],
) -> None:
    run = start(*HANGS, "run.steps=24")
    run.fake.writing = (8, 2)

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(13) is not None:
            run.fake.writing = (-1, -1)

    run.fake.on_call = on_call
    events = drive(run)
    assert events[:3] == [("checkpoint", 4), ("checkpoint failed", 8), ("checkpoint failed", 12)]
    assert events[3:] == [("checkpoint", step) for step in (16, 20, 24)] and 8 not in run.folder.saved()


def test_a_commit_that_hangs_after_its_manifest_is_recorded_once_it_has_ended(start: Callable[..., FakeRun]) -> None:
    run = start(*HANGS, "run.steps=20")
    run.fake.committing = {8}

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(13) is not None:
            run.fake.committing.clear()

    run.fake.on_call = on_call
    expected = [("checkpoint", 4), ("checkpoint failed", 8), ("checkpoint failed", 12)]
    assert drive(run) == [*expected, ("checkpoint", 8), ("checkpoint", 16), ("checkpoint", 20)]
    assert run.fake.given_up == {8} and run.folder.saved() == [4, 8, 16, 20]


def test_a_write_that_hangs_while_the_run_goes_back_commits_nothing_and_its_memory_is_left_alone(
    start: Callable[..., FakeRun],
) -> None:
    """A spike in step 17 takes the run back in the same generation."""
    run = start(*HANGS, "checkpoint.every=5", "spikes.policy=rollback", "run.steps=30", "eval.every=0")
    run.fake.spikes, run.fake.writing = {17}, (15, 2)

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(21) is not None:
            run.fake.writing = (-1, -1)

    run.fake.on_call = on_call
    assert [event for event in drive(run) if event[0] == "checkpoint"] == [
        ("checkpoint", step) for step in (0, 5, 10, 25, 30)
    ]
    assert [event["step"] for event in run.events("checkpoint failed")] == [15, 15, 20]
    assert run.events("rollback")[0]["to"] == 15 and not run.fake.overwritten


def test_a_run_folder_that_hangs_costs_checkpoints_and_no_step(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint counts before the records of its steps are on disk, and nothing waits for that."""
    run, hangs, began = start(*HANGS, "run.steps=24"), threading.Event(), time.monotonic()
    monkeypatch.setattr(saving, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "os", SimpleNamespace(fsync=lambda file: hangs.wait(), strerror=os.strerror))
    with pytest.raises(PentadError, match=r"^the last state, after step 24, was not saved: .* has taken nothing for"):
        drive(run)
    assert [row["step"] for row in run.rows()] == list(range(24)) and time.monotonic() < began + 30
    failed = {row["step"]: row["error"] for row in run.events("checkpoint failed")}
    assert [*failed] == [4, 8, 12, 16, 20] and run.folder.saved() == [] and run.fake.given_up == {4}
    assert failed[4] == f"{run.folder.path} has taken nothing for checkpoint.hang_seconds = 5"
    hangs.set()


def test_once_the_run_folder_answers_again_checkpoints_count(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hangs = start(*HANGS, "run.steps=24"), threading.Event()
    monkeypatch.setattr(saving, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "os", SimpleNamespace(fsync=lambda file: hangs.wait(), strerror=os.strerror))

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(13) is not None and not hangs.is_set():
            hangs.set()
            time.sleep(0.2)  # the thread continues
            monkeypatch.setattr(saving, "SYNC_SECONDS", 10.0)

    run.fake.on_call = on_call
    events = drive(run)
    assert events[0] == ("checkpoint failed", 4) and events[-2:] == [("checkpoint", 20), ("checkpoint", 24)]
    assert 4 not in run.folder.saved()


def test_a_run_folder_that_cannot_keep_its_records_costs_the_checkpoint(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, broken = start(*SAVES, "run.steps=12"), [OSError(errno.EIO, "")]

    def fsync(file: int) -> None:
        if broken:
            raise broken.pop()

    monkeypatch.setattr(run_files, "os", SimpleNamespace(fsync=fsync, strerror=os.strerror))
    assert drive(run) == [("checkpoint failed", 4), ("checkpoint", 8), ("checkpoint", 12)]
    assert "Input/output error" in run.events("checkpoint failed")[0]["error"]


def test_checkpoints_by_time_that_a_hang_prevents_are_reported(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = ("checkpoint.every=0", "checkpoint.every_seconds=2", "checkpoint.at_end=false")
    run = start(*HANGS, *seconds, "run.steps=60")
    monkeypatch.setattr(driver, "time", saving.time)

    def on_call(rank: Rank, method: str) -> None:
        if method == "snapshot" and run.fake.writing == (-1, -1):
            run.fake.writing = rank.version, 1

    run.fake.on_call = on_call
    events = drive(run)
    assert [name for name, _ in events] == ["checkpoint failed"] * len(events) and len(events) >= 4


def test_a_run_that_ends_without_a_checkpoint_does_not_wait_for_one_that_hangs(start: Callable[..., FakeRun]) -> None:
    run = start(*HANGS, "checkpoint.at_end=false", "run.steps=10")
    run.fake.writing = (8, 1)
    assert drive(run) == [("checkpoint", 4), ("checkpoint failed", 8)]


def test_a_write_that_hangs_is_not_waited_for_again_after_a_fault(start: Callable[..., FakeRun]) -> None:
    run = start(*HANGS, "mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4", "run.steps=28")
    run.fake.writing, run.fake.faults, began = (8, 2), {18: (0,)}, run.fake.now

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(21) is not None:
            run.fake.writing = (-1, -1)

    run.fake.on_call = on_call
    assert drive(run) == [
        *(("checkpoint", 4), ("checkpoint failed", 8), ("checkpoint failed", 12), ("checkpoint failed", 16)),
        *(("recovered", 18), ("checkpoint failed", 20), ("checkpoint", 24), ("checkpoint", 28)),
    ]
    assert run.fake.now - began < 28 * STEP_SECONDS + 5 + 5


def test_lookups_between_generations_wait_for_no_storage_that_hangs(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hangs = start(*SAVES, "run.steps=12"), threading.Event()
    monkeypatch.setattr(retention, "read_manifest", lambda path: hangs.wait())
    monkeypatch.setattr(RunFolder, "saved", lambda folder: hangs.wait())
    monkeypatch.setattr(retention, "looked_up", partial(retention.looked_up, seconds=0.05))
    run.fake.faults = {10: (2,)}
    assert drive(run)[-1] == ("checkpoint", 12) and run.events("recovered")
    hangs.set()


def test_a_checkpoint_whose_content_storage_does_not_give_is_neither_intact_nor_damaged(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hangs = start(*SAVES), threading.Event()
    run.save(5)
    monkeypatch.setattr(newest_checkpoint, "open_checkpoint", lambda folder: hangs.wait())
    newest = newest_checkpoint.NewestIntact(run.bus, 0.1, restart=False)
    with pytest.raises(Unreadable, match=r"has not answered within 0\.1 s$"):
        newest.is_intact(run.folder.checkpoint(5))
    assert not newest.damaged
    hangs.set()


@pytest.mark.parametrize("ends", [True, False])
def test_a_read_may_take_long_while_storage_answers(ends: bool) -> None:
    hangs = threading.Event()

    def read() -> str:
        for _ in range(8):
            hangs.wait(0.05)
            activity.chunks += 1
        if not ends:
            hangs.wait()
        return "read"

    if ends:
        assert retention.looked_up(read, 0.2) == "read"
    else:
        with pytest.raises(Unreadable, match=r"has not answered within 0\.2 s$"):
            retention.looked_up(read, 0.2)
    hangs.set()
