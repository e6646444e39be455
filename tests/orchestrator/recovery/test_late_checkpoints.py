"""A rank that cannot be reached commits a checkpoint after the run has gone back to before its step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_ray import FakeRun
from small_checkpoint import save_small

from pentad.orchestrator.run.driver import _resume

LINE = ("mesh.dp=1", "mesh.pp=4", "schedule.microbatches=8")


@pytest.mark.parametrize("resumes", [False, True])
def test_it_does_not_count(start: Callable[..., FakeRun], resumes: bool) -> None:
    """The rows of its steps have been removed: a run that continued from it would lack them."""
    run = start(*LINE)
    save_small(run.folder.checkpoint(4), 4, {"generation": 1})
    assert run.recovery.recover(run.lose(0), 7).version == 4
    save_small(run.folder.checkpoint(6), 6, {"generation": 1})
    if resumes:
        assert _resume(run.config, run.folder, run.bus.display, None).step == 4
    else:
        assert run.recovery.recover(run.lose(1), 5).version == 4
        (refused,) = run.events("checkpoint refused")
        assert "is of generation 1, but 2 began with step 4" in refused["cause"]
    assert run.folder.saved() == [4]


def test_one_of_the_generation_that_has_gone_back_counts(start: Callable[..., FakeRun]) -> None:
    run = start(*LINE)
    save_small(run.folder.checkpoint(4), 4, {"generation": 1})
    run.recovery.recover(run.lose(0), 7)
    save_small(run.folder.checkpoint(6), 6, {"generation": 2})
    assert run.recovery.recover(run.lose(1), 6).version == 6 and not run.events("checkpoint refused")
