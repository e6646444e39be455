"""The bytes of one shard: mapped when first read, and checked block by block."""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import CHECKED, Shard, checksum_file

T = TypeVar("T")


class Mapped(NamedTuple):
    """An open shard: its bytes, and which of its blocks have been checked; threads may check a block twice."""

    content: np.ndarray  # [bytes] uint8
    checksums: np.ndarray  # [blocks] uint32
    checked: np.ndarray  # [blocks] bool


class ShardFile:
    """A shard of the corpus in `folder`. `map` opens it; whoever calls that decides how long it stays open."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path, self.shard = folder / shard.file, shard
        self.checksums_path = folder / checksum_file(shard.file)
        self.checked = np.zeros(-(-shard.bytes // CHECKED), bool)

    def require_size(self) -> None:
        """Raises PentadError unless the file is there, as long as the index says."""
        try:
            found = self.path.stat().st_size
        except OSError:
            raise PentadError(f"shard {self.path} is missing: expected a file of {self.shard.bytes} bytes") from None
        if found != self.shard.bytes:
            expected = f"expected {self.shard.bytes} (build the corpus again)"
            raise PentadError(f"shard {self.path} has {found} bytes: {expected}")

    def map(self) -> Mapped:
        """Raises PentadError for a file that is missing, or that the index does not describe."""
        self.require_size()
        return Mapped(_map(self.path), self._read_checksums(), self.checked)

    def _read_checksums(self) -> np.ndarray:
        content = _reported(self.checksums_path.read_bytes, self.checksums_path)
        if (found := hashlib.sha256(content).hexdigest()) != self.shard.checksums:
            raise PentadError(f"{self.checksums_path} is damaged: sha256 is {found}: expected {self.shard.checksums}")
        return np.frombuffer(content, "<u4")

    def read(self, mapped: Mapped, at: int, dtype: np.dtype, count: int) -> np.ndarray:
        """[count] of `dtype` from byte `at` on, not copied. Raises PentadError where a block is damaged."""
        end = at + count * dtype.itemsize
        self.check(mapped, at // CHECKED, -(-end // CHECKED))
        return mapped.content[at:end].view(dtype)

    def check(self, mapped: Mapped, first: int, end: int) -> None:
        """Compares the blocks `first` to `end` with their checksums, unless that has been done."""
        for block in (np.flatnonzero(~mapped.checked[first:end]) + first).tolist():
            content = mapped.content[block * CHECKED : (block + 1) * CHECKED]
            if zlib.crc32(content.data) != mapped.checksums[block]:
                where = f"bytes {block * CHECKED} to {block * CHECKED + len(content)}"
                raise PentadError(f"shard {self.path} is damaged at {where}: expected a copy with intact checksums")
            mapped.checked[block] = True


def _map(path: Path) -> np.ndarray:
    with _reported(lambda: path.open("rb"), path) as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _reported(action: Callable[[], T], path: Path) -> T:
    try:
        return action()
    except OSError as error:
        raise PentadError(f"{path} cannot be read ({error.strerror or error}): expected a readable file") from None
