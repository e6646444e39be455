"""Ctrl-C and SIGTERM as wishes: the first asks to stop after the steps under way, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Takes both signals while used in a `with`; off the main thread it takes none.

    `asked` says that the run should stop soon. Before `patient` is set, and at the second signal, KeyboardInterrupt is
    raised in the main thread; then no further signal disturbs the clearing up.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.patient = self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._seen) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        if self.patient and not self.asked:
            self.asked = True
            return
        for each in self.NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt
