"""The tensors of a checkpoint: ranks write them, or pieces of them, to files, and read them back on any mesh."""

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, Checkpoint, manifest_name, unreadable
from pentad.workers.checkpoint.local_storage import Publishing, missing
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import Shard, Spec, is_file_name
from pentad.workers.checkpoint.safetensors_header import Stored, stored_tensors
from pentad.workers.checkpoint.safetensors_io import DTYPES, header, num_bytes, write_tensors
from pentad.workers.checkpoint.storage import storage_errors, storage_of

CHUNK_ELEMENTS = 2**24  # elements of a device tensor copied to the host and written at a time
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def write_shard(
    folder: Location, file: str, tensors: dict[str, torch.Tensor], publishing: Publishing = nullcontext
) -> Shard:
    """Writes `tensors`, of any device and layout, to `folder/file` as safetensors; complete and durable on return. In a
    store, the file gets a unique name that begins with the stem of `file`.

    Copies to the host some MiB at a time; the caller must not change the tensors meanwhile. The file gets its name
    within `publishing()`, which may raise to prevent that, as it may between two chunks. Raises PentadError, leaving
    nothing behind, for full or unwritable storage, an invalid file or tensor name, a dtype that cannot be stored, and a
    file of a folder that is already committed (`delete_checkpoint` first).
    """
    if not is_file_name(file):
        raise PentadError(f"file is {file!r}: expected a plain name that ends in .safetensors")
    for name, tensor in tensors.items():
        if not (name.isascii() and name.isprintable()) or name in ("", "__metadata__"):
            raise PentadError(f"tensor {name!r} has a name that safetensors cannot store: expected printable ASCII")
        if tensor.dtype not in DTYPES:
            raise PentadError(f"tensor {name} has dtype {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    order = stored_order(tensors)
    specs: dict[str, Spec] = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in order
    }
    required = len(header(specs)) + num_bytes(specs.values())
    with storage_errors(folder, required):
        storage = storage_of(folder)
        files = storage.files(folder)
        if file in files and manifest_name(files) is not None:
            raise PentadError(f"folder {folder} holds a committed checkpoint: expected one without {MANIFEST}")
        if storage.free_bytes(folder) < required:  # fail before filling the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        storage.make_folder(folder)
        parts = _chunks((tensors[name] for name in order), publishing)
        return write_tensors(folder / storage.new_name(file), specs, parts, publishing=publishing)


def write_shards(
    folder: Location,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    generation: int,
    publishing: Publishing = nullcontext,
) -> list[dict[str, Any]]:
    """Writes several files and returns their entries for the manifest. The names contain the generation, so that what
    an unreachable rank of an earlier one writes late is in no checkpoint of this one."""
    names = {file: file.replace(".", f".gen{generation}.", 1) for file in files}
    return [write_shard(folder, names[file], dict(its), publishing).plain() for file, its in files.items()]


def stored_order(tensors: dict[str, torch.Tensor]) -> list[str]:
    """The order of tensors in a file: wide dtypes first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def dtype_of(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The dtype of a tensor in the checkpoint."""
    piece = checkpoint.tensors[name][0]
    with _opened(checkpoint, piece.file) as (_, stored):
        return _TORCH[stored[piece.stored].spec["dtype"]]


def read(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """These tensors, on the CPU in their own memory. Raises PentadError for a name that the checkpoint lacks."""
    names = list(names)
    for name in names:
        if name not in checkpoint.tensors:
            raise PentadError(f"tensor {name} is not in checkpoint {checkpoint.folder}: expected it there")
    shapes = {name: checkpoint.tensors[name][0].shape for name in names}
    return {name: read_elements(checkpoint, name, 0, math.prod(shape)).view(shape) for name, shape in shapes.items()}


def read_elements(
    checkpoint: Checkpoint, name: str, start: int, end: int, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """Elements `start` to `end`, in C order, of a tensor in the checkpoint: flat, on the CPU in their own memory. Reads
    no others.

    With a `buffer` [bytes] they are in it if they fit, or a view of the file if the file is in this process.
    """
    found = None
    for piece in checkpoint.tensors[name]:
        first, last = max(start, piece.start), min(end, piece.end)
        if first < last:
            with _opened(checkpoint, piece.file) as (file, stored):
                spec, at = stored[piece.stored]
                dtype = _TORCH[spec["dtype"]]
                file.seek(at + (first - piece.start) * dtype.itemsize)
                size = (end - start) * dtype.itemsize
                if buffer is not None and (first, last) == (start, end) and hasattr(file, "view"):
                    if (content := file.view(size)).nbytes != size:
                        raise missing(piece.file)
                    return torch.from_numpy(content).view(dtype)
                if found is None:
                    if buffer is None or buffer.numel() < size:
                        buffer = torch.empty(size, dtype=torch.uint8)
                    found = buffer[:size].view(dtype)
                target = found[first - start : last - start].view(torch.uint8).numpy()
                if file.readinto(target) != target.nbytes:
                    raise missing(piece.file)  # truncated since it was verified
    return torch.empty(0, dtype=dtype_of(checkpoint, name)) if found is None else found


@contextmanager
def _opened(checkpoint: Checkpoint, name: str) -> Iterator[tuple[Any, dict[str, Stored]]]:
    """A file of a checkpoint, and where the tensors are in it."""
    path = checkpoint.folder / name
    try:
        with storage_of(path).opened(path) if checkpoint.opened is None else checkpoint.opened(name) as file:
            if name not in checkpoint.headers:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                checkpoint.headers[name] = stored_tensors(file, name, size)
            yield file, checkpoint.headers[name]
    except OSError as error:
        raise unreadable(f"checkpoint {checkpoint.folder}: {name}", error) from error


def _chunks(tensors: Iterable[torch.Tensor], publishing: Publishing) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            with publishing():  # raises if the file will never be published
                pass
            yield flat[start : start + CHUNK_ELEMENTS]
