"""Reads a tensor that torch.save wrote: a zip archive of a small pickle and the data as raw bytes.

The pickle is read by a parser of our own (restricted_pickle): it can specify a dtype, sizes and strides, nothing else.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import CHUNK
from pentad.workers.dcp.restricted_pickle import parse_pickle

_MAX_PICKLE = 1 << 20  # bytes; a tensor's pickle has a few hundred
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
}


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    size: int  # elements


class _Layout(NamedTuple):
    """How a tensor lies in its storage, in elements."""

    storage: _Storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def read_saved_tensor(
    path: Path, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    """The tensor of these sizes in `length` bytes of a file from `start` on; contiguous, in memory of its own.

    Raises PentadError for anything else, before allocating memory for it.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Window(file, start, length)) as archive:
            return _read(archive, sizes, dtype)
    except OSError as error:
        raise PentadError(f"it cannot be read ({error.strerror}): expected a readable file") from None
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, RuntimeError, EOFError) as error:
        raise PentadError(f"it is damaged ({str(error)[:100]}): expected a tensor that torch.save wrote") from None


def _read(archive: zipfile.ZipFile, sizes: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    (pickled,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
    root = pickled.filename.removesuffix("data.pkl")
    known: dict[str, Any] = {f"torch {name}": dtype for name, dtype in _STORAGES.items()}
    known |= {"torch._utils _rebuild_tensor_v2": _layout, "collections OrderedDict": dict}
    layout = parse_pickle(bytes(_bytes(archive, pickled, _MAX_PICKLE)), known, _storage)
    if not isinstance(layout, _Layout):
        raise ValueError("no tensor")
    if (layout.sizes, layout.storage.dtype) != (sizes, dtype):
        raise ValueError(f"{layout.storage.dtype} {list(layout.sizes)} instead of {dtype} {list(sizes)}")
    names = archive.NameToInfo
    if (order := names.get(f"{root}byteorder")) is not None and _bytes(archive, order, 16) != b"little":
        raise ValueError("its bytes are in big-endian order")
    storage = layout.storage
    data = _bytes(archive, archive.getinfo(f"{root}data/{storage.key}"), storage.size * storage.dtype.itemsize)
    return _tensor(layout, data)


def _bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytearray:
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > most:
        raise ValueError(f"{member.filename[:60]} is compressed or too large")
    content = bytearray(member.file_size)
    with archive.open(member) as file:
        view, done = memoryview(content), 0
        while part := file.read(CHUNK):
            view[done : done + len(part)] = part
            done += len(part)
    if done < len(content):
        raise ValueError("its end is missing")
    return content


def _tensor(layout: _Layout, data: bytearray) -> torch.Tensor:
    dtype, sizes, strides = layout.storage.dtype, layout.sizes, layout.strides
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    last = layout.offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if (last + 1) * dtype.itemsize > len(data):
        raise ValueError("it ends outside of its data")
    return torch.frombuffer(data, dtype=dtype).as_strided(sizes, strides, layout.offset).contiguous()


def _storage(given: Any) -> _Storage:
    kind, dtype, key, _, size = given
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str) or type(size) is not int:
        raise ValueError("its data has no valid description")
    return _Storage(dtype, key, size)


def _layout(storage: Any, offset: Any, sizes: Any, strides: Any, *_: Any) -> _Layout:
    numbers = (offset, *sizes, *strides)
    if not isinstance(storage, _Storage) or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("its sizes are not numbers")
    return _Layout(storage, offset, tuple(sizes), tuple(strides))


class _Window(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.at))
        self.file.seek(self.start + self.at)
        count = self.file.readinto(memoryview(buffer)[:count])
        self.at += count
        return count
