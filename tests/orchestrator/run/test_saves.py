"""When checkpoints are saved, and what happens while one is written; on ranks that only list their calls."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import listed_calls
import pytest
from fake_ray import FakeRun
from listed_calls import HELD_OUT, Clock, Ranks, Run, loop_runner
from recovery_runs import SAVES, drive

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.monitoring.runfolder import JOURNAL, RunFolder
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start, fingerprint
from pentad.workers.checkpoint.local_storage import Local


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return loop_runner(tmp_path)


def test_a_requested_checkpoint_covers_only_recorded_steps(run: Run) -> None:
    def request_checkpoint(calls: StepLoop) -> None:
        calls.requests._requested = calls.done  # as `checkpoint` does, but without waiting

    ranks, calls = run("run.steps=50", seconds=0.9, prepare=lambda r: r.at.update({20: request_checkpoint}))
    first = next(call[1] for call in ranks.log if call[0] == "save")
    assert 20 < first < 25
    assert ranks.log.index(("commit", first)) > ranks.log.index(("save", first))
    assert not calls.requests.wants_checkpoint


def test_training_goes_on_while_a_checkpoint_is_written_and_waits_with_the_next_one(run: Run) -> None:
    ranks, calls = run(
        "run.steps=18", "checkpoint.every=6", "eval.every=0", seconds=3.0, prepare=lambda r: r.slow.update({6: 60.0})
    )
    calls_in_order = [("run", 11, 1, True), ("commit", 6), ("save", 12), ("run", 12, 1, True)]
    assert [call for call in ranks.log if call in calls_in_order] == calls_in_order
    assert [call[1] for call in ranks.log if call[0] == "save"] == [6, 12, 18]
    events = [row for row in read_lines(calls.bus.folder.path / JOURNAL) if row["event"] == "checkpoint"]
    assert [(row["step"], row["snapshot_seconds"]) for row in events] == [(6, 0.25), (12, 0.25), (18, 0.25)]


def test_a_checkpoint_by_time_is_not_due_while_one_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.patch(monkeypatch)

    def prepare(ranks: Ranks) -> None:
        clock.ranks = ranks
        ranks.slow[20] = 100.0

    ranks, calls = run(
        "run.steps=60", "checkpoint.every=20", "checkpoint.every_seconds=5", "eval.every=0",
        seconds=1.0, saved_at=0.0, prepare=prepare,
    )  # fmt: skip
    saves = [call[1] for call in ranks.log if call[0] == "save"]
    assert not [step for step in saves if 20 < step < 40], "the second one by steps waits for the first"
    assert {20, 40, 60} <= set(saves) and len(saves) > 6
    waited = {
        row["step"]: row["waited_seconds"] for row in read_lines(calls.bus.folder.path / JOURNAL) if "bytes" in row
    }
    assert waited[40] == 100.0 and sum(waited.values()) == 100.0


def test_milestones_are_saved_and_kept(run: Run) -> None:
    ranks, _ = run("run.steps=20", "checkpoint.every=6", "checkpoint.keep_every=8", "eval.every=0")
    assert [call[1] for call in ranks.log if call[0] == "save"] == [6, 8, 12, 16, 18, 20]
    assert ranks.pinned == [(), (8,), (8,), (8, 16), (8, 16), (8, 16)]


def test_the_checkpoint_of_the_last_step_is_tried_again_when_the_run_stops_there(run: Run) -> None:
    def prepare(ranks: Ranks) -> None:
        def stop_at_rest(calls: StepLoop) -> None:
            ranks.broken.clear()
            calls.requests.resume()
            calls.requests.stop()

        ranks.broken[("save", 8)] = PentadError("disk full")
        ranks.at[6] = lambda calls: calls.requests.pause()
        ranks.at_rest = stop_at_rest

    ranks, calls = run("run.steps=50", "checkpoint.every=4", "eval.every=0", seconds=3.0, prepare=prepare)
    assert [call[1] for call in ranks.log if call[0] == "save"] == [4, 8, 8]
    assert (calls.done, calls.saving.durable) == (8, 8)


@pytest.mark.parametrize("what", ["save", "commit"])
def test_a_failed_checkpoint_does_not_end_training(run: Run, what: str) -> None:
    ranks, calls = run(
        "run.steps=12", "checkpoint.every=4", prepare=lambda r: r.broken.update({(what, 8): PentadError("disk full")})
    )
    assert calls.done == 12
    assert [call[1] for call in ranks.log if call[0] == "commit"] == [4, *([8] if what == "commit" else []), 12]


@pytest.mark.parametrize("what", ["save", "commit"])
def test_the_last_checkpoint_must_be_written(run: Run, what: str) -> None:
    """A failed save is removed, to make room for the next attempt; a failed commit may have succeeded, and stays."""
    used = list[Ranks]()

    def prepare(ranks: Ranks) -> None:
        used.append(ranks)
        ranks.broken[what, 12] = PentadError("disk full")

    with pytest.raises(PentadError, match="disk full"):
        run("run.steps=12", prepare=prepare)
    assert used[0].discarded == ([12] if what == "save" else [])


@pytest.mark.parametrize("what", ["save", "commit"])
def test_a_rank_that_dies_while_it_saves_ends_the_run(run: Run, what: str) -> None:
    died = WorkerError("rank 1 died", 1, "")
    with pytest.raises(WorkerError, match="rank 1 died"):
        run("run.steps=12", "checkpoint.every=4", prepare=lambda r: r.broken.update({(what, 4): died}))


@pytest.mark.parametrize("every", [0, 15])
@pytest.mark.parametrize("every_seconds", [0.0, 10.0])
def test_checkpoints_are_saved_by_steps_and_by_time(
    run: Run, monkeypatch: pytest.MonkeyPatch, every: int, every_seconds: float
) -> None:
    """Steps take a second, and two are in flight when the driver looks at the clock."""
    clock = Clock()
    clock.patch(monkeypatch)
    options = f"checkpoint.every={every}", f"checkpoint.every_seconds={every_seconds}"
    ranks, calls = run(
        "run.steps=40", *options, seconds=1.0, saved_at=0.0, prepare=lambda ranks: setattr(clock, "ranks", ranks)
    )
    saves = [call[1] for call in ranks.log if call[0] == "save"]
    assert set(saves) >= {40, *(range(every, 41, every) if every else ())}
    if every_seconds:
        assert max(end - start for start, end in pairwise([0, *saves])) <= 13
        assert len(saves) <= 40 // 10 + (40 // every if every else 0)
    else:
        assert len(saves) == (3 if every else 1)
    assert calls.saving.durable == 40


def test_commits_keep_the_best_checkpoint(run: Run) -> None:
    losses = {4: 3.0, 8: 1.0, 12: 2.0, 16: 0.5}
    ranks, calls = run(
        "run.steps=18", *HELD_OUT, "eval.every=2", "checkpoint.every=4", "checkpoint.keep_best=true",
        prepare=lambda ranks: ranks.losses.update(losses),
    )  # fmt: skip
    assert ranks.pinned == [(4,), (8,), (8,), (16,), (16,)]
    events = read_lines(calls.bus.folder.path / JOURNAL)
    assert [row["step"] for row in events if row["event"] == "best"] == [4, 8, 16]


def test_a_rank_that_dies_while_a_checkpoint_is_written_costs_the_steps_since_the_one_before(
    start: Callable[..., FakeRun],
) -> None:
    run = start(*SAVES, "run.steps=12")
    run.fake.writing, run.fake.faults = (8, 2), {10: (2,)}

    def on_call(rank: object, method: str) -> None:
        if method == "restore" and run.group.generation > 1:
            assert run.folder.saved() == [4], "a checkpoint that one rank has not written counts"
            run.fake.writing = (-1, -1)

    run.fake.on_call = on_call
    events = drive(run)
    assert events == [
        ("checkpoint", 4), ("checkpoint failed", 8), ("recovered", 4), ("checkpoint", 8), ("checkpoint", 12),
    ]  # fmt: skip


def test_a_full_disk_costs_a_note_and_an_event_and_the_next_checkpoint_is_tried(
    start: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = start(*SAVES, "run.steps=14"), list[str]()
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.fake.full = {4, 8}
    expected = [("checkpoint failed", 4), ("checkpoint failed", 8), ("checkpoint", 12), ("checkpoint", 14)]
    assert drive(run) == expected
    found = [row for row in run.events("checkpoint failed") if "No space left" in row["error"]]
    assert [row["step"] for row in found] == [4, 8]
    assert [note.partition(",")[0] for note in notes if "No space left" in note] == [
        "no checkpoint of step 4", "no checkpoint of step 8",
    ]  # fmt: skip


def test_a_full_disk_at_the_end_ends_the_run_with_an_error(start: Callable[..., FakeRun]) -> None:
    run = start(*SAVES, "run.steps=14")
    run.fake.full = {14}
    with pytest.raises(PentadError, match="No space left"):
        drive(run)
    assert run.folder.saved() == [4, 8, 12]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_checkpoint_that_is_committed_when_a_rank_is_lost_is_in_the_journal(
    start: Callable[..., FakeRun], lost: int
) -> None:
    """Rank 0 commits: it may have done so before the driver hears of it."""
    run = start(*SAVES, "checkpoint.every=8", "run.steps=24")
    run.fake.committing, run.fake.faults = {8}, {14: (lost,)}

    def on_call(rank: object, method: str) -> None:
        if run.group.generation > 1:
            run.fake.committing.clear()

    run.fake.on_call = on_call
    assert drive(run) == [("recovered", 8), ("checkpoint", 8), ("checkpoint", 16), ("checkpoint", 24)]
    manifests = {event["step"]: event["manifest"] for event in run.events("checkpoint")}
    assert manifests == {step: fingerprint(run.folder.checkpoint(step)) for step in run.folder.saved()}


def test_a_checkpoint_that_a_driver_has_committed_when_it_died_is_in_the_journal_of_the_next_one(
    start: Callable[..., FakeRun],
) -> None:
    run = start(*SAVES, "run.steps=12")
    run.save(8)
    begin = Start(run.folder.checkpoint(8), 8)
    for _ in range(2):
        run.group.restore(begin)
        driver._run_generations(run.config, run.group, run.bus, run.requests, begin)
    assert [event["step"] for event in run.events("checkpoint")].count(8) == 1


def test_training_itself_reads_no_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """So storage that hangs blocks a rank's writing thread, but never the driver."""

    def reads(*_: object) -> None:
        raise AssertionError("the driver reads storage")

    monkeypatch.setattr(RunFolder, "saved", reads)
    for method in ("files", "folders", "opened", "delete_files"):
        monkeypatch.setattr(Local, method, reads)
    monkeypatch.setattr(listed_calls, "save_small", lambda folder, step: None)
    monkeypatch.setattr(listed_calls, "fingerprint", lambda folder: "")
    monkeypatch.setattr(listed_calls, "committed", lambda folder: [4, 8])
    broken: dict[tuple, PentadError] = {("save", 8): PentadError("disk full")}
    _, calls = run("run.steps=12", "checkpoint.every=4", prepare=lambda ranks: ranks.broken.update(broken))
    assert calls.done == calls.saving.durable == 12
