"""Files that survive a crash: whole under their name, or not there at all.

The order is temporary name, write, flush, fsync, close, rename, fsync of the folder. Without the first fsync a power
cut leaves a file of the right name and no content; without the last one the name itself can vanish.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pentad.schedules.ir.errors import PentadError

CHUNK = 4 << 20  # bytes hashed and written at a time


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the answer of file systems that know no fsync of a folder
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates `folder` and its missing parents, each name on the disk before the next one.

    The name of an existing `folder` is forced too: whoever created it may have crashed before doing so.
    """
    if not os.path.lexists(folder.parent):
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_file(path: Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
    """Puts `pieces` into `path`, atomically and durably; returns the bytes written and their sha256.

    The hash is taken of each piece on its way to the disk, not of what a re-read gives: a re-read right after the
    write comes from the page cache, so it proves nothing about the disk, and where it does differ it would certify
    the damage. The hash of what was meant makes any later difference visible. Raises OSError, and then the temporary
    file is gone; if the very last fsync failed, `path` may hold the new content, which is whole.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # unique: a stale writer cannot share it
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            for piece in pieces:
                for start in range(0, len(piece), CHUNK):
                    chunk = piece[start : start + CHUNK]
                    digest.update(chunk)
                    size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size, digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write where `folder` is or would be."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0


@contextmanager
def storage(folder: Path, expected: int) -> Iterator[None]:
    """Turns a failure of the storage under `folder` (full, read-only, gone, broken) into one PentadError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise PentadError(
            f"folder {folder} takes no checkpoint: {expected} bytes are expected, {free_bytes(folder)} are free: {why}"
        ) from error
