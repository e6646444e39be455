"""A run folder that hangs stops neither training nor a recovery, and no line is lost. Ranks are in this process
(`fake_ray`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
from fake_ray import FakeRun
from hanging_disk import HangingDisk
from recovery_runs import LINE, SQUARE

from pentad.orchestrator.monitoring import runfolder
from pentad.orchestrator.monitoring.run_state import Watcher
from pentad.orchestrator.records import run_files
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

pytestmark = pytest.mark.timeout(60)
NO_SAVES = ("checkpoint.every=0", "checkpoint.every_seconds=0", "checkpoint.at_end=false")
StartRun = Callable[..., FakeRun]


class Events(Watcher):
    """Collects the names of events that watchers hear of."""

    def __init__(self) -> None:
        self.names = list[str]()

    def on_event(self, entry: dict[str, object]) -> None:
        self.names.append(str(entry["event"]))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(run_files, "HANG_SECONDS", 0.2)
    for module in (run_files, runfolder):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.3)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeRun], HangingDisk]]:
    disks = list[HangingDisk]()

    def on(run: FakeRun) -> HangingDisk:
        disks.append(HangingDisk(monkeypatch, run.folder.path))
        return disks[0]

    yield on
    for disk in disks:
        disk.hangs = False


def train(run: FakeRun) -> int:
    run.group.restore(Start())
    return driver._run_generations(run.config, run.group, run.bus, run.requests, Start())


def test_a_run_folder_that_hangs_stops_no_training_and_loses_no_line(
    start: StartRun, hang: Callable[[FakeRun], HangingDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(*SQUARE, *NO_SAVES, "run.steps=40", "data.holdout=0.1", "eval.every=5")
    notes, events = list[str](), Events()
    disk, hung = hang(run), threading.Event()
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.bus.watchers.append(events)

    def on_call(rank: object, method: str) -> None:
        if run.fake.trained.get(10) is not None and not hung.is_set():
            disk.hangs = True
            hung.set()
        if run.fake.trained.get(30) is not None and disk.hangs:
            threading.Event().wait(0.3)  # as long as steps take on a GPU
            run.bus.watch_disk()
            disk.hangs = False

    run.fake.on_call = on_call
    assert train(run) == 40
    run.bus.settle()
    assert [row["step"] for row in run.rows()] == list(range(40))
    assert [row["step"] for row in run.folder.evaluations()] == list(range(5, 41, 5))
    kinds = [name for name in events.names if name.startswith("records")]
    assert kinds == ["records wait", "records written"]
    assert [row["event"] for row in run.folder.journal() if row["event"].startswith("records")] == kinds
    said = [note for note in notes if "run's files" in note or "in memory" in note]
    hangs = rf"{run.folder.path} has taken nothing for 0\.\d s"
    assert re.fullmatch(f"{hangs}; what is recorded is in memory meanwhile, and no checkpoint is committed", said[0])
    assert re.fullmatch(r"the run's files are complete again: \d+ changes have waited in memory", said[1])


@pytest.mark.parametrize("overrides", [SQUARE, (*LINE, "zero.stage=0")])
def test_a_rank_lost_while_the_run_folder_hangs_is_replaced(
    start: StartRun,
    hang: Callable[[FakeRun], HangingDisk],
    overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a replica or from the checkpoint: neither reads or writes a file of the run."""
    run = start(*overrides)
    run.save(5)
    for step in range(7):
        run.bus.record("before", step=step)
    disk = hang(run)
    disk.hangs = True
    state = run.recovery.recover(run.lose(1), 7)
    assert run.versions() == [state.version] * 4
    run.bus.rewind(state.version)
    assert run.folder.journal()[-1]["event"] == "recovered"
    disk.hangs = False
    run.folder.files.settle()
    assert run.events("recovered")[0]["generation"] == run.folder.generation


def test_a_run_folder_that_hangs_for_good_ends_the_run_with_what_is_lost(
    start: StartRun, hang: Callable[[FakeRun], HangingDisk]
) -> None:
    run = start(*SQUARE, *NO_SAVES, "run.steps=9")
    disk = hang(run)
    disk.hangs = True
    assert train(run) == 9
    with pytest.raises(
        PentadError, match=rf"^{run.folder.path} has taken nothing for \d\.\d s; not written are "
    ) as error:
        run.bus.settle()
    lost = str(error.value).partition("not written are ")[2].split(", ")  # in the order in which files first got lines
    assert {"11 lines of audit.jsonl", "9 lines of metrics.jsonl", "1 line of eval.jsonl"} <= {*lost}


def test_timelines_that_a_disk_never_takes_cost_a_note(
    start: StartRun, hang: Callable[[FakeRun], HangingDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = start(*SQUARE, *NO_SAVES, "run.steps=9"), list[str]()
    disk = hang(run)
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.group.restore(Start())
    disk.hangs = True
    assert train(run) == 9
    assert [note for note in notes if note.startswith("no timeline: ")]
