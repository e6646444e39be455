"""The lock of a run's folder, held until it is closed or the process ends. Its file contains the process ID and the
newest generation of the run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pentad.orchestrator.records.json_lines import reported
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import regular_file

LOCK = ".lock"
_GENERATION_AT = 20  # bytes


class RunLock:
    """The lock of a run's folder. `generation` is the newest one saved before it was taken, 0 if none was."""

    def __init__(self, path: Path, problem: str) -> None:
        """Takes the lock. If another process holds it, raises PentadError with `problem`, in which {holder} is replaced
        by that process."""
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            self.close()
            raise PentadError(problem.replace("{holder}", holder)) from None
        os.pwrite(descriptor, b"%-20d" % os.getpid(), 0)
        text = os.pread(descriptor, 20, _GENERATION_AT)
        self.generation = int(text) if text.strip().isdigit() else 0

    def save(self, generation: int) -> None:
        """Writes the generation in place, which takes no disk space."""
        os.pwrite(self.file.fileno(), b"%20d" % generation, _GENERATION_AT)

    def close(self) -> None:
        self.file.close()


def holder_of(path: Path) -> str:
    """The ID of the process that has locked a run's folder; '' if it is not locked or cannot be read."""
    with suppress(OSError, PentadError), regular_file(path / LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(file.fileno())
    return ""


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, _GENERATION_AT, 0).decode("ascii", "replace").strip() or "unknown"


@contextmanager
def locked(path: Path, problem: str) -> Iterator[None]:
    """Holds the lock of a run's folder for the block. Raises PentadError as RunLock does."""
    with reported(path / LOCK):
        lock = RunLock(path, problem)
    try:
        yield
    finally:
        lock.close()
