"""The files in which a live run records what happens. What the disk does not take, because it is full or away, is kept
in memory, in order, and written once it does: neither training nor a recovery waits for it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.records.json_lines import append, line_of, read_lines, reported, size_of
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import partial_file

Row = dict[str, Any]
MOST_WAITING = 200_000  # changes, some 100 MB: beyond them the run ends
SETTLE_SECONDS, RETRY_SECONDS = 30.0, 0.5  # for which the end of a run waits for the disk, and between two attempts


class Change(NamedTuple):
    """Lines to append to the first `size` bytes of a file, or else all of its content. The size is known from the first
    attempt on: what that may have left after them is no other line."""

    path: Path
    lines: str = ""
    content: bytes = b""
    size: int | None = None


class RunFiles:
    """For any thread: `lock` is held for every change, and by who makes several. `note` gets a message when the disk
    refuses writes, and when it accepts them again."""

    def __init__(self) -> None:
        self.note: Callable[[str], object] = lambda text: None
        self.waiting: deque[Change] = deque()
        self.lock, self.syncing = threading.RLock(), threading.Lock()
        self.failed = 0  # most changes that have waited, since the disk last took all
        self.unsynced = set[Path]()  # to which lines were appended that a power cut could take

    def append(self, path: Path, row: Row, *more: Row) -> None:
        """Adds lines, all at once. Raises PentadError if too many wait already."""
        self._change(Change(path, "".join(map(line_of, (row, *more)))))

    def replace(self, path: Path, content: bytes) -> None:
        self._change(Change(path, content=content))

    def replace_rows(self, path: Path, rows: Iterable[Row]) -> None:
        self.replace(path, "".join(map(line_of, rows)).encode())

    def rows(self, path: Path, keys: Iterable[str] = ()) -> list[Row]:
        """Those of a file, with what waits to be written."""
        with self.lock:
            attempted = self.waiting[0] if self.waiting else None
            found = read_lines(path, keys, attempted.size if attempted and attempted.path == path else None)
            for change in self.waiting:
                if change.path == path:
                    kept = found if change.lines else []
                    found = [*kept, *map(json.loads, (change.lines or change.content).splitlines())]
            return found

    def flush(self) -> None:
        """Writes what waits. Raises PentadError if the disk still does not take it."""
        with self.lock:
            while self.waiting:
                change = self.waiting[0]
                if change.lines and change.size is None:
                    change = self.waiting[0] = change._replace(size=size_of(change.path))
                self._write(change)
                self.waiting.popleft()  # last: what Ctrl-C interrupts is written again, in the same place
            if self.failed:
                self.note(f"the run's files are complete again: {self.failed} changes have waited in memory")
                self.failed = 0

    def sync(self) -> None:
        """Writes what waits, and has the disk keep what was appended, while others append. Raises PentadError if it
        does not."""
        with self.syncing:
            with self.lock:
                self.flush()
                paths, self.unsynced = self.unsynced, set()
            try:
                for path in sorted(paths):
                    with reported(path), path.open("rb") as file:
                        os.fsync(file.fileno())
            except BaseException:
                with self.lock:
                    self.unsynced |= paths
                raise

    def _write(self, change: Change) -> None:
        if change.size is None:
            replace_file(change.path, change.content)
        else:
            self.unsynced.add(change.path)
            append(change.path, change.lines, change.size)

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
        with self.lock:
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
