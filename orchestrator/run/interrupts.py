"""Ctrl-C and SIGTERM: the first asks the run to stop after the steps in flight, the second stops it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """Handles both signals while used in a `with`; off the main thread it handles none.

    The first calls `stop`. Until that is set, and at the second signal, KeyboardInterrupt is raised in the main thread,
    and further signals are ignored during the clean-up.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self.requested = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._receive) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def stop_run(self) -> None:
        """What the first signal does once steps run."""
        if self.stop is not None:
            self.stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None and not self.requested:
            self.requested = True
            self.stop()
            return
        for each in self.NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt
