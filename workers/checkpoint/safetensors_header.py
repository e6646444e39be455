"""Finds the tensors in a safetensors file. Needs no torch."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.manifest import Spec

FIRST_READ = 1 << 16  # bytes, enough for most headers: a request to a store takes longer than reading them
MAX_HEADER = 100_000_000  # bytes, as in safetensors itself


class Stored(NamedTuple):
    """A tensor's dtype and shape, and the byte of the file at which its elements begin."""

    spec: Spec
    start: int


def read_header(file: Any, size: int) -> dict[str, Stored]:
    """The tensors of an open file of `size` bytes. Raises PentadError for anything but a safetensors file."""
    begin = file.read(FIRST_READ)
    length = int.from_bytes(begin[:8], "little")
    if not 8 <= 8 + length <= min(size, MAX_HEADER):
        raise PentadError(f"a header of {length} bytes in {size}")
    text = begin[8 : 8 + length]
    try:
        entries = json.loads(bytes(text) + bytes(file.read(length - len(text))))
        entries.pop("__metadata__", None)
        found = {name: _stored(entry, 8 + length, size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PentadError(f"a header that is not one of safetensors ({type(error).__name__})") from None
    return found


def _stored(entry: dict[str, Any], begin: int, size: int) -> Stored:
    first, last = entry["data_offsets"]
    dtype, shape = entry["dtype"], entry["shape"]
    bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)  # F32, F8_E4M3, BOOL
    if not 0 <= first <= last <= size - begin or (last - first) * 8 != math.prod(shape) * bits:
        raise ValueError
    return Stored(Spec(dtype=dtype, shape=shape), begin + first)


def stored_tensors(file: Any, name: str, size: int) -> dict[str, Stored]:
    """The tensors of an open shard of this name. Raises Damaged if it is not a safetensors file."""
    try:
        return read_header(file, size)
    except Damaged:
        raise
    except PentadError as error:
        raise Damaged(f"{name} cannot be read ({error}): expected a safetensors file") from None
