"""Writes safetensors files one tensor at a time: all shapes first, then each tensor as it is produced."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.local_storage import Publishing
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import Shard, Spec
from pentad.workers.checkpoint.storage import storage_of

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
Progress = Callable[[int, int], None]  # bytes done, bytes in total
_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


def num_bytes(specs: Iterable[Spec]) -> int:
    """The size of these tensors in bytes."""
    return sum(_SIZES[spec["dtype"]] * math.prod(spec["shape"]) for spec in specs)


def header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The start of a file whose tensors follow in the order of `specs`: the length of the JSON (u64, little endian),
    the JSON, and spaces up to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, spec in specs.items():
        entries[name] = {**spec, "data_offsets": [offset, offset + num_bytes([spec])]}
        offset += num_bytes([spec])
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Location,
    specs: dict[str, Spec],
    parts: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    publishing: Publishing = nullcontext,
) -> Shard:
    """Writes a file durably. `parts`, concatenated, are the elements of all tensors in the order of `specs`.

    A part may be part of a tensor or several tensors; it may be on any device, in the tensor's dtype. While the next
    part is produced, only the memory of the last written one is still referenced. `publishing` is as in
    `Storage.write`. Raises OSError.
    """
    written = storage_of(path).write(path, _buffers(specs, parts, metadata), publishing)
    return Shard(path.name, written.bytes, written.sha256, specs, written.crc32)


def write_files(
    folder: Path,
    specs: Mapping[str, Spec],
    limit: int,
    name_of: Callable[[int, int], str],
    read: Callable[[str], Iterable[torch.Tensor]],
    progress: Progress,
    metadata: Mapping[str, str] | None = None,
) -> list[Shard]:
    """Writes tensors, in order, to files of at most `limit` bytes; a larger tensor gets its own file.

    `name_of` takes a file's number, from 0, and the number of files. `read` returns the parts of a tensor, see
    `write_tensors`.
    """
    plan: list[dict[str, Spec]] = []
    room, total, done = 0, num_bytes(specs.values()), 0
    for name, spec in specs.items():
        if not plan or num_bytes([spec]) > room:
            plan.append({})
            room = limit
        plan[-1][name] = spec
        room -= num_bytes([spec])

    def parts(names: Iterable[str]) -> Iterator[torch.Tensor]:
        nonlocal done
        for name in names:
            for part in read(name):
                done += part.nbytes
                yield part
                del part
                progress(done, total)

    return [
        write_tensors(folder / name_of(number, len(plan)), held, parts(held), metadata)
        for number, held in enumerate(plan)
    ]


def _buffers(
    specs: dict[str, Spec], parts: Iterable[torch.Tensor], metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    yield memoryview(header(specs, metadata))
    written = 0
    for part in parts:
        written += part.nbytes
        yield part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        del part
    if written != num_bytes(specs.values()):
        raise PentadError(f"the tensors have {written} bytes: expected {num_bytes(specs.values())}")
