"""Checksums of a checkpoint's files: computed as they are written, and compared block by block as they are read.

The sha256 of a file verifies all of it, and takes one thread that reads all of it. The CRC-32s of its blocks let
several ranks and threads verify just what they read.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError

BLOCK_BYTES = 1 << 20  # 8 MB of manifest per TB; reading a block takes no longer than a small tensor in it
_CRC = struct.Struct(">I")
_HEX = 2 * _CRC.size  # digits of a block


class Damaged(PentadError):
    """A file of a checkpoint is missing, or its content differs from what was written."""


class Written(NamedTuple):
    """A file as it was written: size, sha256, and the CRC-32 of each block of BLOCK_BYTES, in 8 hex digits."""

    bytes: int
    sha256: str
    crc32: str


class Activity:
    """`chunks` grows while this process writes or verifies checkpoint files, which shows that storage is responding."""

    chunks = 0


activity = Activity()


class Checksums:
    """The checksums of the pieces passed to `update`, concatenated."""

    def __init__(self) -> None:
        self.bytes, self._sha256, self._crcs, self._crc = 0, hashlib.sha256(), bytearray(), 0

    def update(self, data: memoryview) -> None:
        activity.chunks += 1
        self._sha256.update(data)
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._crc = zlib.crc32(piece, self._crc)
            at, self.bytes = at + len(piece), self.bytes + len(piece)
            if self.bytes % BLOCK_BYTES == 0:
                self._crcs += _CRC.pack(self._crc)
                self._crc = 0

    def result(self) -> Written:
        last = _CRC.pack(self._crc) if self.bytes % BLOCK_BYTES else b""
        return Written(self.bytes, self._sha256.hexdigest(), (self._crcs + last).hex())


def num_digits(size: int) -> int:
    """The number of digits in the `crc32` of a file of this many bytes."""
    return -(-size // BLOCK_BYTES) * _HEX


class CheckedFile:
    """An open file of `size` bytes with `seek`, `read` and `readinto`, which raise Damaged rather than return a byte of
    a block that differs from its checksum. Blocks that are wanted in part are read in full."""

    def __init__(self, file: Any, name: str, size: int, crc32: str) -> None:
        self.file, self.name, self.size, self.crc32, self.at = file, name, size, crc32, 0
        self._block = bytearray()  # a block of which only a part was wanted

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self.at = at + (self.size if whence == os.SEEK_END else 0)
        return self.at

    def read(self, count: int) -> bytes:
        content = bytearray(max(0, min(count, self.size - self.at)))
        self.readinto(content)
        return bytes(content)

    def readinto(self, target: Any) -> int:
        """Fills the target as far as the file goes; returns the number of bytes."""
        view = memoryview(target).cast("B")
        view = view[: max(0, self.size - self.at)]
        done = 0
        while done < len(view):
            block, skipped = divmod(self.at, BLOCK_BYTES)
            whole = (len(view) - done) // BLOCK_BYTES * BLOCK_BYTES
            if self.at + len(view) - done == self.size:
                whole = len(view) - done  # the last block ends with the file
            if skipped or not whole:
                end = min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)
                self._block = self._block or bytearray(BLOCK_BYTES)
                self._fill(block, content := memoryview(self._block)[:end])
                part = content[skipped : skipped + len(view) - done]
                view[done : done + len(part)] = part
            else:
                self._fill(block, part := view[done : done + whole])
            done, self.at = done + len(part), self.at + len(part)
        return done

    def _fill(self, block: int, target: memoryview) -> None:
        """Reads full blocks, from this one on."""
        self.file.seek(block * BLOCK_BYTES)
        found = self.file.readinto(target)
        activity.chunks += 1
        if found != len(target):
            raise Damaged(f"{self.name} ends at byte {block * BLOCK_BYTES + found}: expected {self.size} bytes")
        for at in range(0, len(target), BLOCK_BYTES):
            number = block + at // BLOCK_BYTES
            expected = self.crc32[number * _HEX : (number + 1) * _HEX]
            if (crc := f"{zlib.crc32(target[at : at + BLOCK_BYTES]):08x}") != expected:
                where = f"{self.name}, bytes {number * BLOCK_BYTES} to {min((number + 1) * BLOCK_BYTES, self.size)}"
                raise Damaged(f"{where}: CRC-32 is {crc}, expected {expected}")
