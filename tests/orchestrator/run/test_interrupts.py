"""Ctrl-C and SIGTERM, sent to this process; and callbacks, which see every row once and whose errors end the run in an
orderly way."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRun
from rich.console import Console

from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.interrupts import Interrupts, StepCallback, StopTraining


def test_the_first_signal_asks_for_a_stop_the_second_interrupts_and_others_are_ignored() -> None:
    before, asked = signal.getsignal(signal.SIGTERM), []
    with Interrupts() as interrupts:
        interrupts.stop = lambda: asked.append("stop")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert asked == ["stop"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_ranks_run_interrupts_at_once() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_stops_a_run_as_sigterm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the signal comes twice; whatever is printed from then on is discarded."""
    asked: list[str] = []
    primary, terminal = os.openpty()
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    with Interrupts() as interrupts:
        interrupts.stop = lambda: asked.append("stop")
        interrupts.terminals = [terminal]
        os.close(primary)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(terminal, b"step 1")
        signal.raise_signal(signal.SIGHUP)
        os.write(terminal, b"step 2")
        signal.raise_signal(signal.SIGHUP)
    os.close(terminal)
    assert asked == ["stop"]


def test_what_is_shown_on_a_closed_terminal_ends_no_run() -> None:
    primary, terminal = os.openpty()
    with os.fdopen(terminal, "w") as file:
        display = Display(Console(file=file, _environ={"TERM": "xterm"}), "run", 3)
        assert display.is_live
        os.close(primary)
        display.phase("starting Ray")
        display.note("checkpoint refused")
        display.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # as at SIGHUP


def test_a_closed_pipe_stops_a_run_that_has_begun() -> None:
    """With a checkpoint, as after Ctrl-C, which in `pentad train | tee log` ends `tee` as well."""
    stops: list[str] = []
    reader, pipe = os.pipe()
    with os.fdopen(pipe, "w") as file, Display(Console(file=file), "trial", 3) as shown:
        shown.output.on_closed = lambda: stops.append("stop")
        shown.note("is read")
        os.close(reader)
        for text in ("is not", "nor is this"):
            shown.note(text)
    assert stops == ["stop"]


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Boom(Exception):
    pass


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step} for step in steps]


def callback(seen: list[int], at: int, error: Exception | None) -> tuple[StepCallback, list[str]]:
    def on_step(row: dict[str, Any]) -> bool:
        seen.append(row.pop("step"))  # the row is a copy
        if error is not None and seen[-1] == at:
            raise error
        return True  # has no meaning

    stops: list[str] = []
    return StepCallback(on_step, lambda: stops.append("stop")), stops


@pytest.mark.parametrize("error", [None, StopTraining(), Boom()])
def test_an_exception_stops_the_run_once_and_is_raised_when_it_is_over(error: Exception | None) -> None:
    seen: list[int] = []
    watcher, stops = callback(seen, 3, error)
    given = rows(0, 1, 2, 3, 4)

    def run() -> None:
        with watcher.raised():
            watcher.on_steps(given[:2], [])
            watcher.on_steps(given[2:], [])

    if isinstance(error, Boom):
        with pytest.raises(Boom):
            run()
    else:
        run()
    assert seen == [0, 1, 2, 3] + [4] * (error is None)
    assert stops == ["stop"] * (error is not None)
    assert given == rows(0, 1, 2, 3, 4)


@pytest.mark.parametrize("error", [None, StopTraining(), Boom()])
def test_an_error_of_the_run_comes_before_the_callbacks(error: Exception | None) -> None:
    watcher, _ = callback([], 0, error)

    def run() -> None:
        with watcher.raised():
            watcher.on_steps(rows(0), [])
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk") as caught:
        run()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), SystemExit(1)])  # the latter from rich, for a closed pipe
def test_the_journal_says_that_a_run_was_interrupted(start: Callable[..., FakeRun], cause: BaseException) -> None:
    run = start()
    with pytest.raises(type(cause)), driver._failures_recorded(run.bus):
        raise cause
    assert run.events("failure")[0]["error"] == "the run was interrupted, without a checkpoint"
