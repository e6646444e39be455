"""Prepares the steps that come next in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_AHEAD = 16  # steps
POLL_SECONDS = 0.05


class Prefetcher(Generic[T]):
    """Calls `load(step)` for ascending steps, ahead of `get`, as long as all that is ready takes at most `limit` bytes
    (by `size`), but always one step.

    After a jump to any other step, that step is loaded next: what `get` returns never depends on what was ready.
    """

    def __init__(self, load: Callable[[int], T], size: Callable[[T], int], limit: int) -> None:
        self.load, self.size, self.limit = load, size, limit
        self.changed = threading.Condition()
        self.ready: dict[int, T | BaseException] = {}
        self.wanted, self.next_step, self.loading, self.closed = 0, 0, -1, False
        self.thread: threading.Thread | None = None

    def get(self, step: int, check: Callable[[], None]) -> T:
        """Waits for a step, and calls `check` meanwhile. Raises what `load` has raised for it."""
        with self.changed:
            self.wanted, self.ready = step, {ahead: each for ahead, each in self.ready.items() if ahead >= step}
            if step not in self.ready and step != self.loading:
                self.ready.clear()
                self.next_step = step
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="pentad-data", daemon=True)
                self.thread.start()
            self.changed.notify_all()
            while step not in self.ready:
                check()
                self.changed.wait(POLL_SECONDS)
            found = self.ready.pop(step)
            self.changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self._has_room())
                if self.closed:
                    return
                step = self.loading = self.next_step
                self.next_step = step + 1
            found: T | BaseException
            try:
                found = self.load(step)
            except BaseException as error:  # `get` raises it
                found = error
            with self.changed:
                self.loading = -1
                if step >= self.wanted and step + 1 == self.next_step:  # else it was left behind by a jump
                    self.ready[step] = found
                self.changed.notify_all()

    def _has_room(self) -> bool:
        values = list(self.ready.values())
        if any(isinstance(each, BaseException) for each in values) or len(values) >= MOST_AHEAD:
            return False
        sizes = [self.size(each) for each in values if not isinstance(each, BaseException)]
        return not sizes or sum(sizes) + max(sizes) <= self.limit
