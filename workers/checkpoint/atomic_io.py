"""Files that survive a crash: complete under their name, or absent.

The order is: temporary name, write, flush, fsync, close, rename, fsync of the folder. Without the first fsync a power
cut can leave a file with the right name and no content; without the last one the name itself can vanish.
"""

import errno
import fcntl
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checksums import Checksums, Written

CHUNK = 4 << 20  # bytes hashed at a time
BLOCK = 16 << 20  # bytes written at a time
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk, quota or size limit
DIRECT = getattr(os, "O_DIRECT", 0)


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # raised by file systems that cannot fsync folders
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates `folder` and its missing parents, each name on disk before the next one.

    Also syncs the name of an existing `folder`: whoever created it may have crashed before doing so.
    """
    if not os.path.lexists(folder.parent):
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


@contextmanager
def new_folder(out: Path, argument: str = "OUT") -> Iterator[Path]:
    """A folder to fill: a hidden one that is renamed to `out` when the block ends, or `out` itself if it exists and is
    empty.

    If the block fails, `out` is as before and nothing else is left. Raises PentadError, naming `argument`, if `out` has
    content, even if another process creates it meanwhile, and for every OSError.
    """
    require_empty(out, argument)
    existed = out.is_dir()
    folder = out if existed else out.parent / f".{out.name}.{secrets.token_hex(8)}"
    created = [parent for parent in out.parents if not os.path.lexists(parent)]
    try:
        folder.mkdir(parents=True, exist_ok=existed)
        yield folder
        sync_folder(folder)
        if not existed:
            os.rename(folder, out)
            sync_folder(out.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if existed:
            out.mkdir(exist_ok=True)
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        require_empty(out, argument)
        fault = f"which cannot be written ({error.strerror or error})"
        raise PentadError(f"{argument} is '{out}', {fault}: expected a writable folder with free space") from None


def require_empty(out: Path, argument: str = "OUT") -> None:
    """Raises PentadError, naming `argument`, unless `out` is an empty folder or does not exist."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise PentadError(f"{argument} is '{out}', which exists and is not empty: expected a new or empty folder")


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A hidden file to write, renamed to `path` at the end, or removed when the block fails; it is not synced."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_file(
    path: Path,
    parts: Iterable[memoryview],
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    replace: bool = True,
) -> Written:
    """Writes `parts` to `path`, atomically and durably; returns its size and checksums.

    The file gets its name within `publishing()`, which may raise to prevent that. Without `replace`, raises
    FileExistsError if `path` exists, provided that the file system has hard links.

    The checksums are of the bytes on their way to disk, not of a re-read: right after the write that would come from
    the page cache and say nothing about the disk. Raises OSError, with the temporary file removed; if only the last
    fsync failed, `path` may hold the new content, complete.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # unique: a stale writer cannot share it
    checksums = Checksums()
    try:
        with _DirectFile(partial) as file:
            for part in parts:
                for start in range(0, len(part), CHUNK):
                    chunk = part[start : start + CHUNK]
                    checksums.update(chunk)
                    file.write(chunk)
            file.sync()
        with publishing():
            (os.replace if replace else _rename_new)(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return checksums.result()


class _DirectFile:
    """A new file, written past the page cache if the file system can do that (O_DIRECT): caching a checkpoint would
    take processor time from training, and memory from data that is read repeatedly."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.block, self.filled = mmap.mmap(-1, BLOCK), 0  # aligned, as O_DIRECT requires
        self._set_direct(on=True)

    def write(self, data: memoryview) -> int:
        at = 0
        while at < len(data):
            count = min(BLOCK - self.filled, len(data) - at)
            target = np.frombuffer(self.block, np.uint8, count, self.filled)
            np.copyto(target, np.frombuffer(data, np.uint8, count, at))  # without the GIL
            self.filled, at = self.filled + count, at + count
            if self.filled == BLOCK:
                self._flush()
        return len(data)

    def sync(self) -> None:
        """Forces everything to disk."""
        self._set_direct(on=False)  # the last block may have any length
        self._flush()
        os.fsync(self.descriptor)

    def __enter__(self) -> "_DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def _flush(self) -> None:
        left, self.filled = memoryview(self.block)[: self.filled], 0
        while left:
            try:
                left = left[os.write(self.descriptor, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._set_direct(on=False)  # O_DIRECT was accepted but is not supported

    def _set_direct(self, *, on: bool) -> None:
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~DIRECT
        self.is_direct = False
        with suppress(OSError):
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | (DIRECT if on else 0))
            self.is_direct = on


def _rename_new(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.replace(partial, path)
    else:
        partial.unlink()


def free_bytes(folder: Path) -> float:
    """Bytes an unprivileged user may still write where `folder` is or would be; inf if the file system does not count
    them."""
    for existing in (folder, *folder.parents):
        try:
            usage = shutil.disk_usage(existing)
            return usage.free if usage.total else math.inf
        except OSError:
            continue
    return 0
