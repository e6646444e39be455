"""A user's function that is called after every step, in the driver's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pentad.orchestrator.monitoring.run_state import Watcher
from pentad.schedules.simulate.timeline import Span

OnStep = Callable[[dict[str, Any]], object]


class StopTraining(Exception):
    """Raised by `on_step` to end a run as 'stopped': after the steps in flight, with a checkpoint."""


class StepCallback(Watcher):
    """Calls `on_step` with each row of metrics.jsonl. Its first exception calls `stop` and ends the calls; `raised`
    then raises it."""

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
        """Raises the function's exception when the block is over, unless it is StopTraining. An error of the block
        itself comes first, and names the function's as its cause."""
        try:
            yield
        except Exception as error:
            if self.error is None:
                raise
            raise error from self.error
        if self.error is not None and not isinstance(self.error, StopTraining):
            raise self.error
