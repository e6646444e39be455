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
    """An open shard: its bytes, and which of its blocks have been checked. Threads may check a block twice."""

    memory: mmap.mmap
    content: np.ndarray  # [bytes] uint8, a view of `memory`
    checksums: np.ndarray  # [blocks] uint32
    checked: np.ndarray  # [blocks] bool
    copy: LocalCopy | None  # for a remote shard: fetches missing blocks


class ShardFile:
    """A shard of the corpus in `folder`; a remote one has a copy in `cache`. `map` opens it, and its caller decides how
    long it stays open."""

    def __init__(self, folder: Folder, shard: Shard, cache: Path) -> None:
        self.folder, self.shard, self.cache = folder, shard, cache
        self.name = f"{folder.name}/{shard.file}"
        self.checked = np.zeros(-(-shard.bytes // CHECKED), bool)

    def require_size(self, found: int | None, copy: LocalCopy | None = None) -> None:
        """Raises PentadError unless `found`, the size in bytes of the file or its copy (None: missing), is what the
        index says."""
        if found is None:
            raise PentadError(f"shard {self.name} is missing: expected a file of {self.shard.bytes} bytes")
        if found != self.shard.bytes:
            name, remedy = (self.name, "build the corpus") if copy is None else (copy.path, "start")
            raise PentadError(f"shard {name} has {found} bytes: expected {self.shard.bytes} ({remedy} again)")

    def map(self) -> Mapped:
        """Opens the shard. Raises PentadError for a file that is missing or not as the index describes it."""
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
        """[count] of `dtype` from byte `at` on, without a copy. Raises PentadError if a block is damaged, or the file's
        size has changed."""
        end = at + count * dtype.itemsize
        self.check(mapped, at // CHECKED, -(-end // CHECKED))
        return mapped.content[at:end].view(dtype)

    def check(self, mapped: Mapped, first: int, end: int) -> None:
        """Compares the blocks `first` to `end` with their checksums, unless they have been checked; fetches missing
        blocks of a remote shard. Raises PentadError for damaged ones."""
        size = reported(mapped.memory.size, self.name)  # the file's; access beyond its end raises SIGBUS
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
