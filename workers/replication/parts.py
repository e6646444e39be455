"""What a process holds of the copies in memory: its own part of the state after some step, and parts of other ranks.

A copy of a step consists of one part per rank, which is what that rank would write to a checkpoint. Each part is held
by two processes: the rank's own and another one, its holder. A copy counts once both have every part, which the driver
finds out and then announces (`commit`); until then the previous copy is kept.

State that goes to another mesh is a copy, too, with one part per parameter shard, in the processes of all ranks that
hold the shard (`hand_over`). It counts as soon as all parts exist. Needs no torch.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.safetensors_header import Stored

Index = dict[str, dict[str, Stored]]  # where the tensors of each file of a part begin in it


class CopyKey(NamedTuple):
    """A copy of the state after `step` steps, made in a generation, of this many `parts`."""

    generation: int
    step: int
    parts: int


class HeldPart(NamedTuple):
    """A part that a process holds: its copy, its number (the rank, unless it was handed over), its size in bytes, and
    whether the copy counts, as far as the process knows."""

    key: CopyKey
    owner: int
    bytes: int
    committed: bool
    tensors: Index


@dataclass
class CopyPart:
    """A part in memory: `data` [bytes]. `memory`, which contains it, is passed to `recycle` when the part is
    dropped."""

    index: Index
    data: np.ndarray
    memory: Any
    recycle: Callable[[Any], object]


class HostCopies:
    """All parts that one process holds. From any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[tuple[CopyKey, int], CopyPart] = {}
        self.committed = set[CopyKey]()
        self.spare: list[np.ndarray] = []  # memory of dropped parts of other ranks
        self.own_spare: list[Any] = []  # memory of the process's own rank, of `own_bytes` bytes each
        self.own_bytes = -1

    def put(self, key: CopyKey, owner: int, part: CopyPart) -> None:
        """Adds a part, replacing those of this owner that belong to no committed copy."""
        self.discard(owner)
        with self.lock:
            self.parts[key, owner] = part

    def discard(self, owner: int) -> None:
        """Drops the parts of this owner that belong to no committed copy."""
        with self.lock:
            for each in [each for each in self.parts if each[1] == owner and each[0] not in self.committed]:
                self._drop(each)

    def commit(self, key: CopyKey) -> None:
        """Marks the copy as complete and drops all others. Ignored if the copy is not here, because it never was or a
        newer one counts: the driver's message then comes too late."""
        with self.lock:
            if all(held != key for held, _ in self.parts):
                return
            self.committed = {key}
            for other in [each for each in self.parts if each[0] != key]:
                self._drop(other)

    def hand_over(self, key: CopyKey, number: int, part: CopyPart) -> None:
        """Adds a part of a copy that needs no `commit`. The previous copy stays, in case a part is lost."""
        with self.lock:
            self.committed.add(key)
        self.put(key, number, part)

    def forget(self, key: CopyKey | None = None) -> None:
        """Drops all parts, because the steps in them no longer count, or those of one copy."""
        with self.lock:
            self.committed = {each for each in self.committed if key not in (None, each)}
            for part in [each for each in self.parts if key in (None, each[0])]:
                self._drop(part)

    def held(self) -> list[HeldPart]:
        with self.lock:
            found = self.parts.items()
            return [HeldPart(k, owner, p.data.nbytes, k in self.committed, p.index) for (k, owner), p in found]

    def find(self, key: CopyKey, owner: int) -> np.ndarray | None:
        """The bytes of a part, if it is here."""
        with self.lock:
            part = self.parts.get((key, owner))
            return None if part is None else part.data

    def room(self, size: int) -> np.ndarray:
        """Memory for a part of another rank, if possible that of a dropped one. Raises PentadError if there is none."""
        with self.lock:
            for number, memory in enumerate(self.spare):
                if memory.nbytes == size:
                    return self.spare.pop(number)
            self.spare.clear()
        try:
            pages = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise PentadError(
                f"a copy of another rank's state needs {size} bytes of host memory: expected room"
            ) from None
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8, size)

    def _drop(self, which: tuple[CopyKey, int]) -> None:
        part = self.parts.pop(which)
        part.recycle(part.memory)
