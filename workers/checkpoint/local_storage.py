"""What checkpoints need of storage, implemented by a local folder. Stores are in remote_storage."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from pentad.workers.checkpoint import atomic_io
from pentad.workers.checkpoint.checksums import Written, activity
from pentad.workers.checkpoint.location import RemotePath

Publishing = Callable[[], AbstractContextManager[None]]
L = TypeVar("L", Path, RemotePath, Path | RemotePath)


class File(NamedTuple):
    """Size in bytes, Unix time of the last change in seconds, a value that differs after any change, and whether it is
    a regular file."""

    bytes: int
    time: float
    version: tuple[int, ...]
    is_regular: bool = True


class Storage(Protocol[L]):
    """Files in folders, all named by one kind of location. Every method raises OSError."""

    may_rot: bool  # whether a file's bytes may change; otherwise its size proves it intact
    grace_seconds: float  # after which a file in no manifest is abandoned; until then others may be writing it

    def folders(self, root: L) -> list[str]:
        """The names of the folders in `root`, without links. Empty if there is no such folder."""

    def files(self, folder: L) -> dict[str, File]:
        """Everything else in `folder`, by name. Empty if there is no such folder."""

    def opened(self, file: L) -> AbstractContextManager[Any]:
        """The file, with `read`, `readinto` and `seek`."""

    def make_folder(self, folder: L) -> None:
        """Creates a folder and its missing parents, if the store has folders."""

    def free_bytes(self, folder: L) -> float:
        """Bytes that can still be written there."""

    def new_name(self, name: str) -> str:
        """The name under which a shard is written: one that no file has ever had, unless a file replaces another one
        atomically."""

    def write(self, file: L, parts: Iterable[memoryview], publishing: Publishing = nullcontext) -> Written:
        """Writes a file durably; returns its size and checksums. The file appears before this returns, and not if
        `publishing()`, entered first, raises."""

    def write_new(self, file: L, content: bytes, publishing: Publishing = nullcontext) -> None:
        """Writes a file at once within `publishing()`. If `is_exclusive`, raises FileExistsError if the file exists
        with other content."""

    def is_exclusive(self, root: L) -> bool:
        """Whether the first of two writers of `write_new` wins; otherwise the last one does. Fails if nothing can be
        written."""

    def set_aside(self, folder: L, first: str) -> L:
        """Renames the folder of a damaged checkpoint, or its file `first`; returns the new name."""

    def delete(self, folder: L, first: Iterable[str] = ()) -> None:
        """Deletes a folder, if it exists; the files `first` in it before all others."""

    def delete_files(self, folder: L, names: Iterable[str]) -> None:
        """Deletes files, and the folder if it is then empty."""

    def sweep(self, root: L, before: float) -> None:
        """Discards unfinished writes of files below `root` that began before that Unix second."""


def sha256_of(file: Any) -> str:
    """The sha256 of the rest of an open file."""
    digest = hashlib.sha256()
    while chunk := file.read(atomic_io.CHUNK):
        digest.update(chunk)
        activity.chunks += 1
    return digest.hexdigest()


class Local:
    """A folder of a file system that ranks share."""

    may_rot = True
    grace_seconds = 0.0  # a lock keeps others away

    def folders(self, root: Path) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(root) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return []

    def files(self, folder: Path) -> dict[str, File]:
        found = dict[str, File]()
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted in the meantime
                    if not entry.is_dir(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        version, is_regular = (status.st_ino, status.st_mtime_ns), stat.S_ISREG(status.st_mode)
                        found[entry.name] = File(status.st_size, status.st_mtime, version, is_regular)
        return found

    def opened(self, file: Path) -> AbstractContextManager[Any]:
        return open(file, "rb")

    def make_folder(self, folder: Path) -> None:
        atomic_io.make_folder(folder)

    def free_bytes(self, folder: Path) -> float:
        return atomic_io.free_bytes(folder)

    def new_name(self, name: str) -> str:
        return name

    def write(self, file: Path, parts: Iterable[memoryview], publishing: Publishing = nullcontext) -> Written:
        return atomic_io.write_file(file, parts, publishing)

    def write_new(self, file: Path, content: bytes, publishing: Publishing = nullcontext) -> None:
        try:
            atomic_io.write_file(file, [memoryview(content)], publishing, replace=False)
        except FileExistsError:
            if file.read_bytes() != content:
                raise

    def is_exclusive(self, root: Path) -> bool:
        return True

    def set_aside(self, folder: Path, first: str) -> Path:
        return folder.rename(free_name(folder, os.path.lexists))

    def delete(self, folder: Path, first: Iterable[str] = ()) -> None:
        if os.path.lexists(folder):
            for name in first:
                (folder / name).unlink(missing_ok=True)
            atomic_io.sync_folder(folder)
            shutil.rmtree(folder)
            atomic_io.sync_folder(folder.parent)

    def delete_files(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
            folder.rmdir()

    def sweep(self, root: Path, before: float) -> None:
        pass


LOCAL = Local()


def free_name(place: L, is_taken: Callable[[L], bool]) -> L:
    """The first free name of the form step-00000020.refused-1."""
    number = 1
    while is_taken(aside := place.with_name(f"{place.name}.refused-{number}")):
        number += 1
    return aside


def missing(name: str) -> OSError:
    """The error with which a file system reports a missing file."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
