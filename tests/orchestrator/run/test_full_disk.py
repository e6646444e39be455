"""A full disk ends a run with one sentence and leaves only entire lines. Ranks are in this process (`fake_ray`)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fake_ray import FakeRun
from full_disk import largest_file

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

StartRun = Callable[..., FakeRun]
SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
EVALUATES = ("checkpoint.every=1", "data.holdout=0.1", "eval.every=1")
FILES = ("metrics.jsonl", "eval.jsonl", "journal.jsonl", "audit.jsonl")


@pytest.mark.parametrize("largest", [300, 7000, 12000])
def test_a_full_disk_ends_the_run_with_one_sentence_and_entire_lines(start: StartRun, largest: int) -> None:
    run = start(*SQUARE, *EVALUATES)
    run.group.restore(Start())
    folder = re.escape(str(run.folder.path))
    sentence = rf"^{folder}/({'|'.join(FILES)}) cannot be written \(File too large\): expected a run.folder with room$"
    with pytest.raises(PentadError, match=sentence), largest_file(largest), driver._failures_recorded(run.bus):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert run.bus.view.state == "failed"
    assert all(path.read_bytes()[-1:] in (b"", b"\n") for path in run.folder.path.glob("*.jsonl"))
    steps = [row["step"] for row in read_lines(run.folder.path / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    run.bus.record("later")  # where there is room again
    assert run.events("later")


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
