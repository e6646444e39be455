"""A resumed run keeps the learning rates that its first start planned, and says what changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.monitoring.runfolder import CONFIG
from pentad.orchestrator.run.resumed_optimizer import with_decay_steps
from pentad.schedules.ir.errors import PentadError

SCHEDULES = ["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


def configuration(folder: Path, *overrides: str) -> RunConfig:
    return load(None, [f"run.folder={folder}", *overrides])


def started(folder: Path, *overrides: str) -> RunConfig:
    """The configuration of a run's first start, saved in its folder."""
    config, note = with_decay_steps(configuration(folder, *overrides))
    assert note == ""
    path = folder / config.run.name
    path.mkdir()
    (path / CONFIG).write_text(dump(config))
    return config


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_steps_on_a_resume_change_no_planned_learning_rate(tmp_path: Path, schedule: str) -> None:
    overrides = f"optimizer.schedule={schedule}", "run.steps=40"
    before = started(tmp_path, *overrides)
    assert before.optimizer.decay_steps == 40
    after, note = with_decay_steps(configuration(tmp_path, *overrides, "run.steps=400"))
    assert (after.run.steps, after.optimizer.decay_steps) == (400, 40)
    assert after.optimizer.curve(after.run.steps) == before.optimizer.curve(before.run.steps)
    assert ("keeps its schedule of optimizer.decay_steps = 40" in note) == (schedule != "constant")


def test_a_given_length_is_taken_and_the_change_is_said(tmp_path: Path) -> None:
    started(tmp_path, "run.steps=40")
    after, note = with_decay_steps(configuration(tmp_path, "run.steps=80", "optimizer.decay_steps=80"))
    assert after.optimizer.decay_steps == 80
    assert note == (
        "the learning rate has changed: now cosine to 0.0003 over 80 steps from 0.003, "
        "before cosine to 0.0003 over 40 steps from 0.003"
    )


def test_the_saved_length_must_fit_the_new_warm_up(tmp_path: Path) -> None:
    started(tmp_path, "run.steps=40")
    with pytest.raises(
        PentadError, match=r"^optimizer\.warmup_steps is 50: expected at most optimizer\.decay_steps = 40$"
    ):
        with_decay_steps(configuration(tmp_path, "run.steps=80", "optimizer.warmup_steps=50"))
