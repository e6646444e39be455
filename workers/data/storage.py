"""The folder of a corpus: local, or on any file system that pyarrow supports, with partial copies of its shards here.

A copy of a remote shard is a sparse file. No record is kept of which blocks it has: their checksums tell. The ranks of
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
    """A folder, called `name` in messages; `path` is local if `filesystem` is None. Reading raises PentadError."""

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
        """Sizes in bytes of the files in it, by name; empty if a remote folder does not exist."""
        if self.filesystem is None:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return reported(lambda: remote_sizes(self.filesystem, self.path), self.name)


def remote_sizes(filesystem: fs.FileSystem, path: str) -> dict[str, int]:
    """Sizes in bytes of the files in a remote folder, by name; empty if it does not exist. Raises OSError."""
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return {info.base_name: info.size for info in found if info.type == fs.FileType.File}


def folder_at(text: str | Path, argument: str) -> Folder:
    """The folder with this path or URI. Raises PentadError, naming `argument`, if its file system cannot be opened."""
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
        """Copies `size` bytes from byte `at` on from the remote file."""
        content = self.folder.read_at(self.file, at, size)
        with writing(self.path), self.path.open("r+b", buffering=0) as copy:
            os.pwrite(copy.fileno(), content, at)


def cached(folder: Folder, file: str, cache: Path, is_intact: Callable[[bytes], bool]) -> bytes:
    """The content of a small remote file, from its copy in `cache` if that is intact."""
    path = cache / file
    if path.exists() and is_intact(content := path.read_bytes()):
        return content
    content = folder.read(file)
    with writing(path):
        cache.mkdir(parents=True, exist_ok=True)
        write_file(path, [memoryview(content)])
    return content


class writing:
    """Turns an OSError from writing to the cache into a PentadError that names `data.cache`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            fault = f"where {self.path} cannot be written ({error.strerror or error})"
            raise PentadError(f"data.cache is '{self.path.parent}', {fault}: expected a folder with room") from None


def reported(action: Callable[[], T], name: str) -> T:
    """The result of an action that reads the file or folder `name`. Raises PentadError, naming it, if it cannot be
    read."""
    try:
        return action()
    except (OSError, pa.ArrowException) as error:
        raise PentadError(f"{name} cannot be read ({first_line(error)}): expected a readable file") from None
