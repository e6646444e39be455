"""The files in which a live run records what happens. What the disk does not take, because it is full or away, is kept
in memory, in order, and written once it does: neither training nor a recovery waits for it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.records.json_lines import append, line_of, read_lines, reported
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import partial_file

Row = dict[str, Any]
MOST_WAITING = 200_000  # changes, some 100 MB: beyond them the run ends
SETTLE_SECONDS, RETRY_SECONDS = 30.0, 0.5  # for which the end of a run waits for the disk, and between two attempts


class Change(NamedTuple):
    """Lines to append to a file, or else all of its content."""

    path: Path
    lines: str = ""
    content: bytes = b""


class RunFiles:
    """`note` gets a message when the disk refuses writes, and when it accepts them again."""

    def __init__(self) -> None:
        self.note: Callable[[str], object] = lambda text: None
        self.waiting: deque[Change] = deque()
        self.failed = 0  # most changes that have waited, since the disk last took all

    def append(self, path: Path, row: Row, *more: Row) -> None:
        """Adds lines, all at once. Raises PentadError if too many wait already."""
        self._change(Change(path, "".join(map(line_of, (row, *more)))))

    def replace(self, path: Path, content: bytes) -> None:
        self._change(Change(path, content=content))

    def replace_rows(self, path: Path, rows: Iterable[Row]) -> None:
        self.replace(path, "".join(map(line_of, rows)).encode())

    def rows(self, path: Path, keys: Iterable[str] = ()) -> list[Row]:
        """Those of a file, with what waits to be written."""
        found = read_lines(path, keys)
        for change in self.waiting:
            if change.path == path:
                kept = found if change.lines else []
                found = [*kept, *map(json.loads, (change.lines or change.content).splitlines())]
        return found

    def flush(self) -> None:
        """Writes what waits. Raises PentadError if the disk still does not take it."""
        while self.waiting:
            path, lines, content = self.waiting[0]
            if lines:
                append(path, lines)
            else:
                replace_file(path, content)
            self.waiting.popleft()
        if self.failed:
            self.note(f"the run's files are complete again: {self.failed} changes have waited in memory")
            self.failed = 0

    def settle(self) -> None:
        """At the end of a run: waits a while for the disk. Raises PentadError if it takes no more."""
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                return self.flush()
            except PentadError:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_SECONDS)

    def _change(self, change: Change) -> None:
        self.waiting.append(change)
        try:
            self.flush()
        except PentadError as error:
            if len(self.waiting) > MOST_WAITING:
                raise
            if not self.failed:
                self.note(f"{error}; until then it is kept in memory, and no checkpoint is committed")
            self.failed = max(self.failed, len(self.waiting))


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with atomic_file(path) as partial:
        partial.write_bytes(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file of a run to write, which is at `path` at the end, or as before when the block fails."""
    with reported(path), partial_file(path) as partial:
        yield partial
