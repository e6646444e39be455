"""What holds for every case of damaged input: one sentence or success, within time and memory, with nothing left."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from pentad.orchestrator.cli.cli import main
from pentad.schedules.ir.errors import PentadError, ScheduleError

MOST_SECONDS = 5.0  # of CPU time, since a test machine may be busy
MOST_BYTES = 500 << 20
LONGEST_SENTENCE = 2000
SETTLE_SECONDS = 2.0  # for a server's threads and sockets to end
PROGRESS = ("import-hf", "convert", "data")  # commands that report progress on stderr
TRIES = 3  # other threads open things now and then, but not every time

Read = Callable[[bytes], object]


class Broken(AssertionError):
    """An input cost more than a sentence."""


class Guard:
    """Calls a reader with damaged content, and compares the process and the folder with their state before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.refused, self.accepted = folder, 0, 0
        self.seconds, self.bytes = 0.0, 0  # of the worst case

    def check(self, read: Read, content: bytes) -> None:
        """Raises Broken, or whatever `read` raises that is not a user error."""
        for _ in range(TRIES):
            if not (left := self._read(read, content)):
                return
        raise Broken(left)

    def _read(self, read: Read, content: bytes) -> str:
        """Says what is open afterwards that was not before; empty: nothing."""
        files, before = set(self._files()), _open_things()
        _reset_peak()
        at_first, began = _memory("VmRSS"), time.process_time()
        try:
            read(content)
            self.accepted += 1
        except (PentadError, ScheduleError) as error:
            self.refused += 1
            _check_sentences(error)
        seconds, grown = time.process_time() - began, _memory("VmHWM") - at_first
        self.seconds, self.bytes = max(self.seconds, seconds), max(self.bytes, grown)
        if seconds > MOST_SECONDS:
            raise Broken(f"it takes {seconds:.1f} s: expected at most {MOST_SECONDS:g}")
        if grown > MOST_BYTES:
            raise Broken(f"it takes {grown >> 20} MiB: expected at most {MOST_BYTES >> 20}")
        if left := set(self._files()) - files:
            raise Broken(f"it leaves {', '.join(sorted(left))}")
        return _left_open(before)

    def _files(self) -> list[str]:
        return [f"{at}/{name}" for at, folders, names in os.walk(self.folder) for name in (*folders, *names)]


def command(*words: str, statuses: Collection[int] = (0, 1)) -> None:
    """Runs a command, which must succeed or print sentences; `plan` and `checkpoint verify` may say on stdout what is
    wrong."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(list(words))
    lines = err.getvalue().splitlines()
    if status not in statuses or (status and not lines and words[0] not in ("plan", "checkpoint")):
        raise Broken(f"{' '.join(words)} has status {status} and prints {err.getvalue()[:500]!r}")
    if "\x1b" in out.getvalue() + err.getvalue():
        raise Broken(f"{' '.join(words)} prints escape sequences")
    said = lines[-1:] if words[0] in PROGRESS else lines[:1]
    if wrong := [line for line in said if (status and not line.startswith("pentad: ")) or len(line) > LONGEST_SENTENCE]:
        raise Broken(f"{' '.join(words)} prints {wrong[0][:500]!r}")


def _check_sentences(error: Exception) -> None:
    sentences = error.sentences if isinstance(error, PentadError) else [str(error).partition("\n")[0]]
    for sentence in sentences:  # the command line prints each as one line
        if not 0 < len(sentence.strip()) <= LONGEST_SENTENCE:
            raise Broken(f"a sentence of {len(sentence)} characters: {sentence[:500]!r}") from error


def _open_things() -> tuple[int, int, int]:
    """Descriptors, threads and children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)


def _left_open(before: tuple[int, int, int]) -> str:
    """Says what is left open in addition to before; empty: nothing."""
    until = time.monotonic() + SETTLE_SECONDS
    while any(now > then for now, then in zip(_open_things(), before, strict=True)):
        if time.monotonic() > until:
            return f"descriptors, threads and children are {_open_things()}: expected {before}, as before"
        gc.collect()  # a file in the traceback of an error
        time.sleep(0.01)
    return ""


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise AssertionError(key)
