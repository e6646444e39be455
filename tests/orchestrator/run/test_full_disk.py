"""A full disk stops neither training nor a recovery, and no line is lost. Ranks are in this process (`fake_ray`)."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ray import FakeRun
from full_disk import largest_file

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import checkpoint_bytes
from pentad.orchestrator.planning.planning import first_plan
from pentad.orchestrator.records import run_files
from pentad.orchestrator.records.checkpoint_places import RECORD_BYTES, check_room
from pentad.orchestrator.records.json_lines import reported
from pentad.orchestrator.run import driver
from pentad.orchestrator.run import train as training
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import atomic_io
from pentad.workers.checkpoint.checkpoint import Start

StartRun = Callable[..., FakeRun]
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
EVALUATES = ("checkpoint.every=1", "data.holdout=0.1", "eval.every=1")
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # without replicas
SENTENCE = (
    r".*/(metrics|eval|journal|audit)\.jsonl cannot be written \(File too large\): expected a run.folder with room"
)


@pytest.fixture(autouse=True)
def nobody_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "SETTLE_SECONDS", 0.0)


@pytest.mark.parametrize("largest", [0, 300, 7000])
def test_a_full_disk_stops_no_training_and_loses_no_line(
    start: StartRun, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is room again, lines wait in memory, files hold only entire lines, and no checkpoint is committed.
    Here the run ends before that, so it fails because of its last checkpoint."""
    run, notes = start(*SQUARE, *EVALUATES, "run.steps=12"), list[str]()
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.group.restore(Start())
    last = "^the last state, after step 12, was not saved: .* cannot be written"
    with pytest.raises(PentadError, match=last), largest_file(largest), driver._failures_recorded(run.bus):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert all(path.read_bytes()[-1:] in (b"", b"\n") for path in run.folder.path.glob("*.jsonl"))
    assert len(run.rows()) < 12 and run.folder.saved() == sorted(set(run.folder.saved()) - {12})
    run.bus.settle()
    assert [row["step"] for row in run.rows()] == list(range(12))
    assert [row["step"] for row in run.folder.evaluations()] == list(range(1, 13))
    assert run.events("failure") and not run.folder.files.waiting
    said = [note for note in notes if "in memory" in note]
    assert re.fullmatch(f"{SENTENCE}; what is recorded is in memory meanwhile, and no checkpoint is committed", said[0])
    assert re.fullmatch(r"the run's files are complete again: \d+ changes have waited in memory", said[1])
    assert len(said) == 2 and run.events("records wait") and run.events("records written")


@pytest.mark.parametrize("overrides", [SQUARE, (*LINE, "zero.stage=0")])
def test_a_rank_lost_on_a_full_disk_is_replaced(start: StartRun, overrides: tuple[str, ...]) -> None:
    """From a replica or from the checkpoint: neither needs to write a file of the run."""
    run = start(*overrides)
    run.save(5)
    for step in range(7):
        run.bus.record("before", step=step)
    with largest_file(0):
        state = run.recovery.recover(run.lose(1), 7)
        assert run.versions() == [state.version] * 4
        assert not run.events("recovered") and run.folder.journal()[-1]["event"] == "recovered"
    run.folder.files.settle()
    assert run.events("recovered")


def test_a_disk_that_stays_full_ends_the_run_with_one_sentence(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(*SQUARE)
    monkeypatch.setattr(run_files, "SETTLE_SECONDS", 0.6)
    with largest_file(0):
        run.bus.record("later")
        lost = r"not written are 2 lines of journal\.jsonl, 2 lines of audit\.jsonl"
        with pytest.raises(PentadError, match=f"^{SENTENCE}; {lost}$"):
            run.folder.files.settle()
        monkeypatch.setattr(run_files, "MOST_WAITING", 6)
        run.bus.record("later")
        with pytest.raises(PentadError, match=f"^{SENTENCE}, and 7 changes wait in memory$"):
            run.bus.record("much later")
    run.folder.files.settle()
    assert len(run.events("later")) == 2


def test_a_full_disk_hides_no_failure_of_a_rank(start: StartRun) -> None:
    run = start(*SQUARE)
    with pytest.raises(WorkerError, match=r"^rank 3 died$"), largest_file(0), driver._failures_recorded(run.bus):
        raise run.lose(3)


def test_timelines_that_do_not_fit_cost_a_note(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notes = start(*SQUARE, "run.steps=9"), list[str]()
    monkeypatch.setattr(run.bus.display, "note", notes.append)

    def full(*_: object) -> None:
        raise PentadError("timeline.arrow cannot be written (No space left on device)")

    monkeypatch.setattr(run.folder, "timelines", full)
    run.group.restore(Start())
    assert driver._run_generations(run.config, run.group, run.bus, run.requests, Start()) == 9
    assert notes == ["no timeline: timeline.arrow cannot be written (No space left on device)"]


@pytest.mark.parametrize("free", [0, 300_000])
def test_a_run_without_room_for_its_records_ends_before_anything_starts(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, [f"run.folder={tmp_path}", "run.name=first"])
    monkeypatch.setattr(training, "launch", None)
    _leave_free(monkeypatch, free)
    with pytest.raises(PentadError) as caught:
        training.train(config)
    has = f"run.folder is '{tmp_path}', whose disk has {'293.0 KiB' if free else '0 B'} free"
    assert str(caught.value) == f"{has}: expected 1.0 MiB for the run's records, and room for checkpoints of 30.0 MiB"
    assert not list(tmp_path.iterdir())


def test_a_run_without_room_for_a_checkpoint_says_so_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, as there may be room by the time a checkpoint is saved."""
    config = load(None, [f"run.folder={tmp_path}"])
    needed = checkpoint_bytes(first_plan(config))
    _leave_free(monkeypatch, needed + RECORD_BYTES)
    assert check_room(config, needed) is None
    _leave_free(monkeypatch, needed + RECORD_BYTES - 1)
    folder = f"{tmp_path}/quickstart/checkpoints"
    told = f"a checkpoint takes 30.0 MiB, and the disk of {folder} has 31.0 MiB free: none is saved without more room"
    assert check_room(config, needed) == told


def test_a_file_system_that_says_nothing_of_its_size_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, FUSE file systems that do not count blocks."""
    _leave_free(monkeypatch, 0, total=0)
    assert check_room(load(None, [f"run.folder={tmp_path}"]), 2**40) is None


def test_a_run_whose_first_records_the_disk_refuses_waits_for_nothing(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = start(*SQUARE), list[str]()
    monkeypatch.setattr(run_files, "SETTLE_SECONDS", 30.0)
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    began = time.monotonic()
    with (
        largest_file(0),
        pytest.raises(PentadError, match=f"^{SENTENCE}$"),
        driver._failures_recorded(run.bus),
        run.folder.files.beginning(),
    ):
        run.bus.record("start", step=0)
    assert time.monotonic() - began < 10 and not notes
    run.folder.files.settle()
    with run.folder.files.beginning():
        run.bus.record("start", step=0)
    assert not run.folder.files.is_given_up


def test_a_full_disk_is_named_with_the_bytes_that_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _leave_free(monkeypatch, 2048)
    file = tmp_path / "journal.jsonl"
    said = f"{file} cannot be written (No space left on device, 2048 bytes free): expected a run.folder with room"
    with pytest.raises(PentadError) as caught, reported(file):
        raise OSError(errno.ENOSPC, "")
    assert str(caught.value) == said
    for verb in ("read", "written"):
        said = rf"cannot be {verb} \(Permission denied\): expected a file that can be {verb}$"
        with pytest.raises(PentadError, match=said), reported(file, verb):
            raise OSError(errno.EACCES, "")


def _leave_free(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 2**30) -> None:
    usage = atomic_io.shutil._ntuple_diskusage(total, total - free, free)
    monkeypatch.setattr(atomic_io.shutil, "disk_usage", lambda _: usage)
