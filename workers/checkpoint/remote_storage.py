"""Checkpoints in a store that pyarrow opens.

A stream that is not closed cleanly may publish what it has so far, so no shard name is used twice, and no shard counts
before its manifest exists. An object store has no folders. An S3 store that knows If-None-Match refuses to replace a
manifest; in other stores a manifest is written under another name and renamed.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pyarrow as pa
from pyarrow import fs

from pentad.workers.checkpoint import s3_requests
from pentad.workers.checkpoint.atomic_io import CHUNK
from pentad.workers.checkpoint.checksums import Checksums, Written
from pentad.workers.checkpoint.local_storage import File, Publishing, free_name, missing
from pentad.workers.checkpoint.location import RemotePath, first_line
from pentad.workers.checkpoint.s3_requests import Address, Keys

WITHOUT_FOLDERS = ("s3", "gcs", "abfs")
GRACE_SECONDS = 3600.0


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turns pyarrow's errors into OSErrors of one line, with the number that says whether the file exists."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing("") from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise OSError(getattr(error, "errno", None) or errno.EIO, first_line(error)) from error


class Remote:
    """The store at `root`, as pyarrow's `filesystem`; with `keys`, requests can also be sent directly to the `address`
    of its S3 bucket."""

    may_rot = False  # stores compare what they return with checksums of their own
    grace_seconds = GRACE_SECONDS

    def __init__(self, filesystem: fs.FileSystem, root: str, address: Address | None, keys: Keys | None) -> None:
        self.filesystem, self.root, self.address, self.keys = filesystem, root, address, keys
        self._exclusive: bool | None = None  # None until it is known

    @classmethod
    def open(cls, store: RemotePath) -> Remote:
        with _as_os_errors():
            filesystem, root = store.open()
        is_s3 = isinstance(filesystem, fs.S3FileSystem)
        address = s3_requests.address_of(store, filesystem.region) if is_s3 else None
        return cls(filesystem, root.rstrip("/"), address, s3_requests.find_keys() if is_s3 else None)

    def folders(self, root: RemotePath) -> list[str]:
        if self.filesystem.type_name == "gcs":  # pyarrow lists only folders that have a marker object
            start = len(self._path(root)) + 1
            below = [info.path[start:].partition("/") for info in self._listed(root, recursive=True)]
            return sorted({name for name, slash, _ in below if slash})
        return [info.base_name for info in self._listed(root) if info.type == fs.FileType.Directory]

    def files(self, folder: RemotePath) -> dict[str, File]:
        infos = [info for info in self._listed(folder) if info.type == fs.FileType.File]
        return {info.base_name: File(info.size, (info.mtime_ns or 0) / 1e9, (info.mtime_ns or 0,)) for info in infos}

    @contextmanager
    def opened(self, file: RemotePath) -> Iterator[Any]:
        with _as_os_errors(), self.filesystem.open_input_file(self._path(file)) as source:
            yield source

    def make_folder(self, folder: RemotePath) -> None:
        if self.filesystem.type_name not in WITHOUT_FOLDERS:
            with _as_os_errors():
                self.filesystem.create_dir(self._path(folder), recursive=True)

    def free_bytes(self, folder: RemotePath) -> float:
        return float("inf")

    def new_name(self, name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}.{secrets.token_hex(8)}{dot}{ending}"

    def write(self, file: RemotePath, parts: Iterable[memoryview], publishing: Publishing = nullcontext) -> Written:
        checksums = Checksums()
        with _as_os_errors():
            sink = self.filesystem.open_output_stream(self._path(file))
            try:
                for part in parts:
                    for start in range(0, len(part), CHUNK):
                        chunk = part[start : start + CHUNK]
                        checksums.update(chunk)
                        sink.write(chunk)
                with publishing():
                    pass
                sink.close()
            except BaseException:
                self._abandon(sink, file)
                raise
        return checksums.result()

    def write_new(self, file: RemotePath, content: bytes, publishing: Publishing = nullcontext) -> None:
        if self.address is not None and self.keys is not None:
            with publishing():
                is_written = s3_requests.put_new(self.address, self.keys, self._key(file), content)
            if not is_written and self._read(file) != content:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
            return
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
        self.write(partial, [memoryview(content)])
        with publishing(), _as_os_errors():
            self.filesystem.move(self._path(partial), self._path(file))

    def is_exclusive(self, root: RemotePath) -> bool:
        """Tried once, with a file that is then deleted."""
        if self._exclusive is None:
            probe = root / f"probe-{secrets.token_hex(8)}"
            self.make_folder(root)
            self.write_new(probe, b"pentad")
            try:
                if self.address is not None and self.keys is not None:
                    self._exclusive = not s3_requests.put_new(self.address, self.keys, self._key(probe), b"pentad")
                else:
                    self._exclusive = False
            finally:
                self.delete_files(root, [probe.name])
        return self._exclusive

    def set_aside(self, folder: RemotePath, first: str) -> RemotePath:
        names = self.files(folder)
        aside = free_name(folder / first, lambda place: place.name in names)
        with _as_os_errors():
            self.filesystem.move(self._path(folder / first), self._path(aside))
        return aside

    def delete(self, folder: RemotePath, first: Iterable[str] = ()) -> None:
        self.delete_files(folder, first)
        with _as_os_errors(), suppress(FileNotFoundError):
            self.filesystem.delete_dir(self._path(folder))

    def delete_files(self, folder: RemotePath, names: Iterable[str]) -> None:
        for name in names:
            with _as_os_errors(), suppress(FileNotFoundError):
                self.filesystem.delete_file(self._path(folder / name))

    def sweep(self, root: RemotePath, before: float) -> None:
        if self.address is not None and self.keys is not None:
            s3_requests.abort_uploads(self.address, self.keys, f"{self._key(root)}/", before)

    def _path(self, place: RemotePath) -> str:
        return f"{self.root}/{place.path}"

    def _key(self, place: RemotePath) -> str:
        return place.path

    def _listed(self, folder: RemotePath, *, recursive: bool = False) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True, recursive=recursive)
        with _as_os_errors():
            try:
                return list(self.filesystem.get_file_info(selector))
            except FileNotFoundError:  # another rank created the folder between two requests of pyarrow's
                return list(self.filesystem.get_file_info(selector))

    def _read(self, file: RemotePath) -> bytes:
        with self.opened(file) as source:
            return bytes(source.read())

    def _abandon(self, sink: Any, file: RemotePath) -> None:
        """Closes a stream, which may publish what it has so far, and deletes the result."""
        with suppress(OSError, pa.ArrowException):
            sink.close()
        with suppress(OSError, pa.ArrowException):
            self.filesystem.delete_file(self._path(file))
