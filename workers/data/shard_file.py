"""The bytes of one shard: mapped when first read, and checked block by block."""

from __future__ import annotations

import hashlib
import mmap
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import CHECKED, Shard, checksum_file
from pentad.workers.data.storage import Folder, LocalCopy, cached, reported


class Mapped(NamedTuple):
    """An open shard: its bytes, and which of its blocks have been checked; threads may check a block twice."""

    memory: mmap.mmap
    content: np.ndarray  # [bytes] uint8, of `memory`
    checksums: np.ndarray  # [blocks] uint32
    checked: np.ndarray  # [blocks] bool
    copy: LocalCopy | None  # of a remote shard: fetches blocks that are not here


class ShardFile:
    """A shard of the corpus in `folder`, a remote one with a copy in `cache`. `map` opens it; whoever calls that
    decides how long it stays open."""

    def __init__(self, folder: Folder, shard: Shard, cache: Path) -> None:
        self.folder, self.shard, self.cache = folder, shard, cache
        self.name = f"{folder.name}/{shard.file}"
        self.checked = np.zeros(-(-shard.bytes // CHECKED), bool)

    def require_size(self, found: int | None, copy: LocalCopy | None = None) -> None:
        """Raises PentadError unless the file, or the copy of it, is there (None: it is not), as long as the index
        says."""
        if found is None:
            raise PentadError(f"shard {self.name} is missing: expected a file of {self.shard.bytes} bytes")
        if found != self.shard.bytes:
            name, remedy = (self.name, "build the corpus") if copy is None else (copy.path, "start")
            raise PentadError(f"shard {name} has {found} bytes: expected {self.shard.bytes} ({remedy} again)")

    def map(self) -> Mapped:
        """Raises PentadError for a file that is missing, or that the index does not describe."""
        copy, path = None, Path(self.folder.path, self.shard.file)
        if self.folder.filesystem is not None:
            copy = LocalCopy(self.folder, self.shard.file, self.shard.bytes, self.cache)
            path = copy.path
        try:
            with path.open("rb") as file:
                self.require_size(path.stat().st_size)
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            self.require_size(None)
            raise
        except OSError as error:
            raise PentadError(f"{path} cannot be read ({error.strerror}): expected a readable file") from None
        return Mapped(memory, np.frombuffer(memory, np.uint8), self._read_checksums(), self.checked, copy)

    def _read_checksums(self) -> np.ndarray:
        file, expected = checksum_file(self.shard.file), self.shard.checksums
        if self.folder.filesystem is None:
            content = self.folder.read(file)
        else:
            content = cached(self.folder, file, self.cache, lambda text: hashlib.sha256(text).hexdigest() == expected)
        if (found := hashlib.sha256(content).hexdigest()) != expected:
            raise PentadError(f"{self.folder.name}/{file} is damaged: sha256 is {found}: expected {expected}")
        return np.frombuffer(content, "<u4")

    def read(self, mapped: Mapped, at: int, dtype: np.dtype, count: int) -> np.ndarray:
        """[count] of `dtype` from byte `at` on, not copied. Raises PentadError where a block is damaged, and if the
        size of the file is not what it was."""
        end = at + count * dtype.itemsize
        self.check(mapped, at // CHECKED, -(-end // CHECKED))
        return mapped.content[at:end].view(dtype)

    def check(self, mapped: Mapped, first: int, end: int) -> None:
        """Compares the blocks `first` to `end` with their checksums, unless that has been done; of a remote shard,
        fetches those that are not here."""
        size = reported(mapped.memory.size, self.name)  # of the file, beyond whose end access is SIGBUS
        self.require_size(size, mapped.copy)
        for is_fetched in (mapped.copy is None, True):
            damaged = [block for block in range(first, end) if not _is_intact(mapped, block)]
            if not damaged:
                return
            if mapped.copy is not None and not is_fetched:
                at = damaged[0] * CHECKED
                mapped.copy.fetch(at, min((damaged[-1] + 1) * CHECKED, self.shard.bytes) - at)
        where = f"bytes {damaged[0] * CHECKED} to {min((damaged[0] + 1) * CHECKED, self.shard.bytes)}"
        raise PentadError(f"shard {self.name} is damaged at {where}: expected a copy with intact checksums")


def _is_intact(mapped: Mapped, block: int) -> bool:
    if not mapped.checked[block]:
        content = mapped.content[block * CHECKED : (block + 1) * CHECKED]
        mapped.checked[block] = zlib.crc32(content.data) == mapped.checksums[block]
    return bool(mapped.checked[block])
