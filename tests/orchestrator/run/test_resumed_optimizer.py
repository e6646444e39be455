"""A resumed run keeps the learning rates that its first start planned, and says what changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.resumed_optimizer import dropped_state, with_decay_steps
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.optimizer import STATE_KINDS
from pentad.schedules.spec.tensors import tensors

SCHEDULES = ["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


def configuration(folder: Path, *overrides: str) -> RunConfig:
    return load(None, [f"run.folder={folder}", *overrides])


def started(folder: Path, *overrides: str) -> RunConfig:
    """The configuration of a run after its first start."""
    config, note = with_decay_steps(configuration(folder, *overrides), None)
    assert note == ""
    return config


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_steps_on_a_resume_change_no_planned_learning_rate(tmp_path: Path, schedule: str) -> None:
    overrides = f"optimizer.schedule={schedule}", "run.steps=40"
    before = started(tmp_path, *overrides)
    assert before.optimizer.decay_steps == 40
    after, note = with_decay_steps(configuration(tmp_path, *overrides, "run.steps=400"), before)
    assert (after.run.steps, after.optimizer.decay_steps) == (400, 40)
    assert after.optimizer.curve(after.run.steps) == before.optimizer.curve(before.run.steps)
    assert ("keeps its schedule of optimizer.decay_steps = 40" in note) == (schedule != "constant")


def test_a_given_length_is_taken_and_the_change_is_said(tmp_path: Path) -> None:
    before = started(tmp_path, "run.steps=40")
    after, note = with_decay_steps(configuration(tmp_path, "run.steps=80", "optimizer.decay_steps=80"), before)
    assert after.optimizer.decay_steps == 80
    assert note == (
        "the learning rate has changed: now cosine to 0.0003 over 80 steps from 0.003, "
        "before cosine to 0.0003 over 40 steps from 0.003"
    )


def test_another_warm_up_alone_is_said_too(tmp_path: Path) -> None:
    before = started(tmp_path, "run.steps=40")
    _, note = with_decay_steps(configuration(tmp_path, "run.steps=40", "optimizer.warmup_steps=7"), before)
    assert note == "the learning rate has changed: warmup_steps is 7, before 4"


def test_the_saved_length_must_fit_the_new_warm_up(tmp_path: Path) -> None:
    before = started(tmp_path, "run.steps=40")
    with pytest.raises(
        PentadError, match=r"^optimizer\.warmup_steps is 50: expected at most optimizer\.decay_steps = 40$"
    ):
        with_decay_steps(configuration(tmp_path, "run.steps=80", "optimizer.warmup_steps=50"), before)


def stored_by(*overrides: str) -> list[str]:
    """Names of the optimizer state in a checkpoint, some of them of parts of tensors."""
    plan = make_plan(load(None, list(overrides)), "cpu")
    spec = plan.optimizer
    return [
        f"{kind}.{tensor.name}{'@0-8,0-8' if 'down' in tensor.name else ''}"
        for tensor in tensors(plan.model)
        for kind in STATE_KINDS[spec.rule_of(tensor).method]
    ]


def test_state_of_another_optimizer_is_dropped_and_that_is_said() -> None:
    adamw, muon = (make_plan(load(None, [f"optimizer.name={name}"]), "cpu") for name in ("adamw", "muon"))
    stored = {name: stored_by(f"optimizer.name={name}") for name in ("adamw", "muon")}
    assert dropped_state(adamw, stored["adamw"]) == dropped_state(muon, stored["muon"]) == dropped_state(muon, []) == ""
    matrices = 4 * 8  # qkv, out, gate_up and down of every layer
    assert dropped_state(muon, stored["adamw"]) == (
        f"{matrices} tensors change their optimizer: the old state (optimizer.m and optimizer.v) is dropped, "
        "and the new one (optimizer.momentum) begins at 0"
    )
    assert dropped_state(adamw, stored["muon"]) == (
        f"{matrices} tensors change their optimizer: the old state (optimizer.momentum) is dropped, "
        "and the new one (optimizer.m and optimizer.v) begins at 0"
    )
