"""What stops a run early: Ctrl-C, SIGTERM and a closed terminal (SIGHUP), where the first signal waits for the steps in
flight and the second does not; or a user's per-step callback that raises."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pentad.orchestrator.monitoring.run_state import Watcher
from pentad.schedules.simulate.timeline import Span

OnStep = Callable[[dict[str, Any]], object]


class Interrupts:
    """Handles the signals inside a `with` block. Handles none outside the main thread, and leaves SIGHUP alone if it is
    ignored, as under nohup.

    The first signal calls `stop`. A second one, or any before `stop` is set, raises KeyboardInterrupt in the main
    thread; further ones are ignored during the clean-up. After SIGHUP, output meant for the terminal is discarded,
    because writing to a closed one fails.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self.requested = False
        self.before: dict[int, Any] = {}
        self.terminals: list[int] = []  # those of the standard streams

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            handled = [number for number in self.NUMBERS if number != signal.SIGHUP or not nohup]
            self.terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
            self.before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def stop_run(self) -> None:
        """Stops the run as the first signal does once steps run."""
        if self.stop is not None:
            self.stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
            if self.requested:  # the shell and the system may both announce the end of the terminal
                return
        if self.stop is not None and not self.requested:
            self.requested = True
            self.stop()
            return
        for each in self.before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self.terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


class StopTraining(Exception):
    """Raised by `on_step` to end a run as 'stopped': after the steps in flight, with a checkpoint."""


class StepCallback(Watcher):
    """Calls `on_step` with each row of metrics.jsonl, in the driver's main thread. On its first exception it calls
    `stop` and makes no further calls; `raised` raises the exception later."""

    def __init__(self, on_step: OnStep, stop: Callable[[], None]) -> None:
        self.on_step, self.stop = on_step, stop
        self.error: Exception | None = None

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        for row in rows:
            if self.error is None:
                try:
                    self.on_step(dict(row))
                except Exception as error:
                    self.error = error
                    self.stop()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raises the callback's exception, unless it is StopTraining, at the end of the block. An error of the block
        itself takes precedence, with the callback's as its cause."""
        try:
            yield
        except Exception as error:
            if self.error is None:
                raise
            raise error from self.error
        if self.error is not None and not isinstance(self.error, StopTraining):
            raise self.error
