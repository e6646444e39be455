"""Makes a copy in the memory of ranks a checkpoint: it is read like one on disk, on any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.manifest import Shard, pieces_by_tensor
from pentad.workers.replication.parts import CopyKey, HeldPart, HostCopies
from pentad.workers.replication.transfer import Check, open_remote

IN_MEMORY = Path("the memory of ranks")  # named in errors in place of a folder


class FoundPart(NamedTuple):
    """A part, and the address of a process that holds it."""

    part: HeldPart
    address: str


class CopySource(NamedTuple):
    """All parts of a copy, for ranks to read. `token` is the run's token."""

    key: CopyKey
    parts: tuple[FoundPart, ...]
    token: bytes


class LocalPart:
    """A part in this process as a file. `readinto` copies, `view` returns the next bytes themselves; those of the
    process's own rank are pinned."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def seek(self, at: int) -> None:
        self.at = at

    def view(self, size: int) -> np.ndarray:
        found = self.data[self.at : self.at + size]
        self.at += found.nbytes
        return found

    def readinto(self, target: np.ndarray) -> int:
        found = self.view(target.nbytes)
        target[: found.nbytes] = found
        return found.nbytes


def checkpoint_in_memory(source: CopySource, copies: HostCopies, check: Check) -> Checkpoint:
    """The checkpoint made of a copy; parts in this process are read directly, all others from other processes."""
    by_file = {file: each for each in source.parts for file in each.part.tensors}

    def opened(file: str) -> AbstractContextManager[Any]:
        part, address = by_file[file]
        if (data := copies.find(part.key, part.owner)) is not None:
            return _opened(LocalPart(data))
        return open_remote(address, source.token, part.key, part.owner, check)

    index = {file: each.part.tensors[file] for file, each in by_file.items()}
    tensors = pieces_by_tensor(_shards(index))
    return Checkpoint(IN_MEMORY, source.key.step, {}, tensors, headers=index, opened=opened)


def _shards(index: dict[str, dict[str, Any]]) -> Sequence[Shard]:
    """Shards without hashes: bytes are verified when they arrive in a process."""
    return [Shard(file, 0, "", {name: stored.spec for name, stored in its.items()}) for file, its in index.items()]


@contextmanager
def _opened(part: LocalPart) -> Iterator[LocalPart]:
    yield part
