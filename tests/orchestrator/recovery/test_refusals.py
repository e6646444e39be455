"""A rank that cannot read its data ends the run, with a checkpoint of the steps before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRun, Rank

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

SQUARE = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")  # replicas hold identical state
LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")  # no rank's state is anywhere else
StartRun = Callable[..., FakeRun]


@pytest.mark.parametrize(("sizes", "every"), [(SQUARE, 0), (LINE, 0), (SQUARE, 13)])
def test_data_that_cannot_be_read_ends_the_run_with_a_checkpoint(
    start: StartRun, sizes: tuple[str, ...], every: int
) -> None:
    run = start(*sizes, f"checkpoint.every={every}")
    run.fake.unreadable.add(13)
    run.group.restore(Start())
    sentence = r"^shard tokens-00000\.arrow is missing$"
    with pytest.raises(PentadError, match=sentence) as caught, driver._failures_recorded(run.bus):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert not isinstance(caught.value, WorkerError) and run.bus.view.state == "failed"
    assert [row["step"] for row in run.rows()] == list(range(13))
    assert [row["step"] for row in run.events("checkpoint")] == [13] and run.folder.saved() == [13]


def test_a_checkpoint_that_cannot_be_written_hides_no_data_that_cannot_be_read(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise PentadError("No space left on device")

    run, notes = start(*SQUARE, "checkpoint.every=0"), list[str]()
    monkeypatch.setattr(Rank, "save", full)
    monkeypatch.setattr(run.bus.display, "note", notes.append)
    run.fake.unreadable.add(13)
    run.group.restore(Start())
    with pytest.raises(PentadError, match=r"is missing$"):
        driver._run_generations(run.config, run.group, run.bus, run.requests, Start())
    assert notes == ["the state after step 13 was not saved: No space left on device"] and not run.events("checkpoint")
