"""The files in which a live run records what happens. One thread writes them, in order, so that training and recoveries
wait for moments at most. What a full or unreachable disk does not take stays in memory until it does."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pentad.orchestrator.planning.formatting import counted
from pentad.orchestrator.records.json_lines import append, line_of, lines_before, read_lines, reported, size_of
from pentad.schedules.ir.errors import PentadError
from pentad.workers.background import in_daemon
from pentad.workers.checkpoint.atomic_io import partial_file

Row = dict[str, Any]
MOST_WAITING = 200_000  # changes (about 100 MB) beyond which the run ends
WAIT_SECONDS = 0.5  # a working disk takes lines within this time; the ranks have more steps in flight than that
HANG_SECONDS = 5.0  # without an answer before the run reports it
SETTLE_SECONDS, RETRY_SECONDS = 30.0, 0.5  # how long the end of a run waits for the disk, and between two attempts
IDLE_SECONDS = 5.0  # how long the writer waits for more: starting a thread for each step costs more than its lines


class Change:
    """A change to a file, tried until it succeeds; `do` raises PentadError."""

    def __init__(self, path: Path, do: Callable[[], None]) -> None:
        self.path, self.do = path, do

    @property
    def lines(self) -> int:
        return 0


class Append(Change):
    """Lines to append. The file's size is noted at the first attempt: anything after it is what failed attempts
    left."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, self._append)
        self.text, self.size = text, -1

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def _append(self) -> None:
        if self.size < 0:
            self.size = size_of(self.path)
        append(self.path, self.text, self.size)


class RunFiles:
    """The files of the run in `folder`, for any thread. Hold `lock` to make several changes together; it is never held
    during disk access. The lines of files passed to `open` are also kept in memory, so that readers need no disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: deque[Change] = deque()
        self.lock, self.turn, self.syncing = threading.RLock(), threading.Lock(), threading.Lock()
        self.writer_stopped = threading.Condition(self.lock)
        self.writer_woken = threading.Condition(self.lock)
        self.is_writing = self.is_behind = self.is_given_up = False  # if behind or given up, nobody waits any longer
        self.is_idle = self.is_closed = False
        self.moved_at = 0.0  # monotonic second at which the writer began, or the disk last took something
        self.refusal: BaseException | None = None  # why the disk did not take the first change that waits
        self.unsynced = set[Path]()  # files with lines that a power cut could lose
        self.known: dict[Path, list[Row]] = {}
        self.sizes: dict[Path, int] = {}  # bytes of the files with lines after the last write

    def open(self, path: Path, keys: Iterable[str] = ()) -> None:
        """Reads the lines of a file, which must have these keys, into memory. Raises PentadError."""
        self.known[path] = read_lines(path, keys)

    def rows(self, path: Path) -> list[Row]:
        """The rows of a file that was opened, including those that wait to be written."""
        with self.lock:
            return list(self.known[path])

    def append(self, path: Path, row: Row, *more: Row) -> None:
        """Appends rows as lines, all at once. Raises PentadError if too many changes wait already."""
        lines = [line_of(each) for each in (row, *more)]
        with self.lock:
            if path in self.known:
                self.known[path] += map(json.loads, lines)
            self.unsynced.add(path)
            self.change(Append(path, "".join(lines)))

    def replace(self, path: Path, content: bytes) -> None:
        self.change(Change(path, lambda: replace_file(path, content)))

    def replace_rows(self, path: Path, rows: Iterable[Row]) -> None:
        """Replaces all rows of a file that was opened."""
        with self.lock:
            self.known[path] = list(rows)
            self.replace(path, "".join(map(line_of, self.known[path])).encode())

    def change(self, change: Change) -> None:
        """Queues a change after all earlier ones. Raises PentadError if too many wait already."""
        with self.lock:
            self.waiting.append(change)
            self._start()
            if len(self.waiting) > MOST_WAITING:
                raise PentadError(f"{self._stuck()}, and {len(self.waiting)} changes wait in memory")

    def wait(self) -> None:
        """Waits until the disk has taken or refused what was recorded, for at most WAIT_SECONDS, and not again until it
        has caught up."""
        with self.lock:
            if not self.is_behind:
                self.is_behind = not self.writer_stopped.wait_for(lambda: not self.is_writing, WAIT_SECONDS)

    def problem(self) -> str:
        """Why records wait in memory; '' if the disk takes them."""
        with self.lock:
            idle = time.monotonic() - self.moved_at
            is_stuck = self.refusal is not None or (self.is_writing and idle > HANG_SECONDS)
            return self._stuck() if is_stuck else ""

    def flush(self, seconds: float | None) -> None:
        """Waits until the disk has taken what was recorded. Raises PentadError if it refuses, or takes longer than
        `seconds` (None: no limit)."""
        with self.lock:
            self._start()
            if not self.writer_stopped.wait_for(lambda: not self.is_writing, seconds):
                raise PentadError(self._stuck())
            if self.refusal is not None:
                raise self.refusal

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """A block before the first step, during which nobody waits for a disk that refuses records: nothing is lost
        yet. At its end the disk must have taken everything, else PentadError is raised."""
        self.is_given_up = True
        yield
        self.flush(SETTLE_SECONDS)
        self.is_given_up = False

    def sync(self) -> None:
        """Makes what was recorded durable (fsync), while others may append. Waits as long as it takes; raises
        PentadError if the disk refuses it."""
        with self.syncing:
            with self.lock:
                self.flush(None)
                paths, self.unsynced = self.unsynced, set()
            try:
                for path in sorted(paths):
                    with reported(path), path.open("rb") as file:
                        os.fsync(file.fileno())
            except BaseException:
                with self.lock:
                    self.unsynced |= paths
                raise

    def settle(self) -> None:
        """Waits a while for the disk, at the end of a run. Raises PentadError, naming what is lost, if the disk does
        not recover; later calls then hardly wait."""
        until = time.monotonic() + (0.0 if self.is_given_up else SETTLE_SECONDS)
        while True:
            with self.lock:
                self._start()
                self.writer_stopped.wait_for(lambda: not self.is_writing, max(WAIT_SECONDS, until - time.monotonic()))
                if not self.waiting:
                    return
                if time.monotonic() > until:
                    self.is_given_up = True
                    raise PentadError(f"{self._stuck()}; not written are {self._lost()}") from self.refusal
            time.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Waits as `wait` does, and has the writer end as soon as the disk lets it."""
        self.wait()
        with self.lock:
            self.is_closed = True
            self._wake()

    def _start(self) -> None:
        """Has a thread write what waits, unless one is writing already."""
        if self.waiting and not self.is_writing:
            self.is_writing, self.moved_at = True, time.monotonic()
            try:
                if self.is_idle:
                    self._wake()
                else:
                    in_daemon(self._serve)
            except BaseException:  # Ctrl-C, or no more threads: the next change tries again
                self.is_writing = False
                raise

    def _wake(self) -> None:
        self.writer_woken.notify()  # first: after a Ctrl-C in between, the writer still counts as idle
        self.is_idle = False

    def _serve(self) -> None:
        """Runs in a thread of its own: writes, and waits a while for more; meanwhile no other writer is started."""
        with self.turn:
            while True:
                refusal = self._write()
                with self.lock:
                    if refusal is None and self.waiting:
                        continue
                    self._stop(refusal)
                    if refusal is not None and not isinstance(refusal, Exception):
                        raise refusal
                    self.is_idle = not self.is_closed
                    is_woken = self.writer_woken.wait_for(lambda: not self.is_idle, IDLE_SECONDS)
                    self.is_idle = False
                    if not (is_woken and self.is_writing):  # nothing came, or the files were closed
                        return

    def _write(self) -> BaseException | None:
        """Writes until nothing waits or the disk refuses a change; returns the error, for those who settle or sync."""
        while self.waiting:
            change = self.waiting[0]
            try:
                self._make(change)
            except BaseException as error:
                return error
            with self.lock:
                self.waiting.popleft()
                self.moved_at = time.monotonic()
        return None

    def _make(self, change: Change) -> None:
        """Makes a change, unless the file has vanished or shrunk: its file system may have been unmounted."""
        path = change.path
        if (found := size_of(path)) < (left := self.sizes.get(path, 0)):
            fault = f"has {found} bytes" if path.exists() else "is gone"
            raise PentadError(f"{path} {fault}: expected the {left} bytes that were written to it")
        change.do()
        if change.lines or path in self.sizes:
            self.sizes[path] = size_of(path)

    def _stop(self, refusal: BaseException | None) -> None:
        self.refusal, self.is_writing = refusal, False
        self.is_behind = self.is_behind and refusal is not None
        self.writer_stopped.notify_all()

    def _stuck(self) -> str:
        if self.refusal is not None:
            return str(self.refusal)
        return f"{self.folder} has taken nothing for {time.monotonic() - self.moved_at:.1f} s"

    def _lost(self) -> str:
        lines = Counter[str]()
        for change in self.waiting:
            lines[change.path.name] += change.lines
        return ", ".join(f"{counted(count, 'line')} of {name}" if count else name for name, count in lines.items())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def drop_steps(path: Path, step: int) -> None:
    """Drops the lines of step `step` and later ones."""
    replace_file(path, lines_before(path, step))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file to write that replaces the one at `path` at the end of the block; if the block fails, that stays as it
    was."""
    with reported(path), partial_file(path) as partial:
        yield partial
