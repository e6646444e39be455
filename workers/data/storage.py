"""Where a corpus is: a local folder, or one of any file system that pyarrow knows, of whose shards a part is kept here.

A copy of a remote shard is a sparse file. Whether a block of it is here needs no record: its checksum says so. Ranks of
a host share the copy, since all of them write the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import fs

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.checkpoint.location import RemotePath, first_line, unreachable

T = TypeVar("T")


@dataclass(frozen=True)
class Folder:
    """A folder that is called `name`; `path` is local if there is no `filesystem`. Reading raises PentadError."""

    name: str
    path: str
    filesystem: fs.FileSystem | None = None

    def read(self, file: str) -> bytes:
        if self.filesystem is None:
            return reported(Path(self.path, file).read_bytes, f"{self.name}/{file}")
        return self.read_at(file, 0, None)

    def read_at(self, file: str, at: int, size: int | None) -> bytes:
        """`size` bytes (None: all) of a remote file from byte `at` on."""

        def read() -> bytes:
            assert self.filesystem is not None
            with self.filesystem.open_input_file(f"{self.path}/{file}") as source:
                return bytes(source.read_at(source.size() if size is None else size, at))

        return reported(read, f"{self.name}/{file}")

    def sizes(self) -> dict[str, int]:
        """Bytes of the files in it, which is empty if there is no such folder."""
        if self.filesystem is None:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return reported(lambda: remote_sizes(self.filesystem, self.path), self.name)


def remote_sizes(filesystem: fs.FileSystem, path: str) -> dict[str, int]:
    """Bytes of the files in a remote folder, which is empty if there is none. Raises OSError."""
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return {info.base_name: info.size for info in found if info.type == fs.FileType.File}


def folder_at(text: str | Path, argument: str) -> Folder:
    """The folder with this path or URI, which the user calls `argument`. Raises PentadError for an unknown scheme."""
    if "://" not in str(text):
        return Folder(str(text), str(text))
    place = RemotePath.from_uri(str(text))
    try:
        filesystem, path = place.open()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreachable(argument, place, error) from None
    return Folder(place.public, path, filesystem)


class LocalCopy:
    """The copy of a remote file of `size` bytes in the folder `cache`."""

    def __init__(self, folder: Folder, file: str, size: int, cache: Path) -> None:
        self.folder, self.file, self.path = folder, file, cache / file
        with writing(self.path):
            cache.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if os.fstat(descriptor).st_size != size:
                    os.truncate(descriptor, size)
            finally:
                os.close(descriptor)

    def fetch(self, at: int, size: int) -> None:
        """Reads these bytes from the remote file."""
        content = self.folder.read_at(self.file, at, size)
        with writing(self.path), self.path.open("r+b", buffering=0) as copy:
            os.pwrite(copy.fileno(), content, at)


def cached(folder: Folder, file: str, cache: Path, is_intact: Callable[[bytes], bool]) -> bytes:
    """A small remote file, from its copy in `cache` if that is intact."""
    path = cache / file
    if path.exists() and is_intact(content := path.read_bytes()):
        return content
    content = folder.read(file)
    with writing(path):
        cache.mkdir(parents=True, exist_ok=True)
        write_file(path, [memoryview(content)])
    return content


class writing:
    """Names `data.cache` where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            fault = f"where {self.path} cannot be written ({error.strerror or error})"
            raise PentadError(f"data.cache is '{self.path.parent}', {fault}: expected a folder with room") from None


def reported(action: Callable[[], T], name: str) -> T:
    """Does what reads the file or folder `name`. Raises PentadError, which names that, where it cannot be read."""
    try:
        return action()
    except (OSError, pa.ArrowException) as error:
        raise PentadError(f"{name} cannot be read ({first_line(error)}): expected a readable file") from None
