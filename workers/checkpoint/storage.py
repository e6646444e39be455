"""The storage of a place: a local folder's, or a store's."""

from __future__ import annotations

import atexit
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import FULL, free_bytes
from pentad.workers.checkpoint.local_storage import LOCAL, Storage
from pentad.workers.checkpoint.location import Location, RemotePath


def storage_of(place: Location) -> Storage[Any]:
    """The storage of a place; its methods take this place and others of the same store. Raises OSError."""
    if isinstance(place, Path):
        return LOCAL
    return _remote(place.store, place.options)


@lru_cache
def _remote(store: str, options: str) -> Storage[RemotePath]:
    from pentad.workers.checkpoint.remote_storage import Remote  # imports pyarrow

    return Remote.open(RemotePath(store, "", options))


atexit.register(_remote.cache_clear)  # see `location._open`


def access_problem(folder: Location) -> str | None:
    """Why a folder cannot be listed; None if it can be, or if it is in a store and could be created."""
    if isinstance(folder, Path):
        return None if folder.is_dir() else os.strerror(errno.ENOENT)
    try:
        storage_of(folder).files(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def read_bytes(place: Location) -> bytes:
    """The content of a file. Raises OSError."""
    with storage_of(place).opened(place) as file:
        return bytes(file.read())


@contextmanager
def storage_errors(folder: Location, required: int) -> Iterator[None]:
    """Turns a storage failure under `folder` (full, read-only, gone, I/O error) into one PentadError."""
    try:
        yield
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error})"
        if isinstance(folder, Path) and error.errno not in FULL:
            raise PentadError(f"folder {text}: expected a folder that can be written") from error
        if isinstance(folder, Path):
            free = free_bytes(folder)
            raise PentadError(f"folder {text}: expected room for {required} bytes ({free} free)") from error
        raise PentadError(f"{text}: expected a store that takes {required} bytes") from error
