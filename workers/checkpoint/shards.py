"""The tensors of a checkpoint: ranks write them to shards, and read them back on any mesh."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import free_bytes, make_folder, storage_errors
from pentad.workers.checkpoint.checkpoint import MANIFEST, Checkpoint, unreadable
from pentad.workers.checkpoint.manifest import Shard, Spec, is_file_name
from pentad.workers.checkpoint.safetensors_io import DTYPES, header, num_bytes, write_tensors

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def write_shard(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> Shard:
    """Writes `tensors`, of any device and layout, to `folder/file` as safetensors; complete and durable on return.

    Copies to the host one tensor at a time; the caller must not change them meanwhile. Raises PentadError, with nothing
    left behind, for full or unwritable storage, an invalid file or tensor name, a dtype that cannot be stored, and a
    folder that is already committed (`delete_checkpoint` first).
    """
    if not is_file_name(file):
        raise PentadError(f"file is {file!r}: expected a plain name that ends in .safetensors")
    for name, tensor in tensors.items():
        if not (name.isascii() and name.isprintable()) or name in ("", "__metadata__"):
            raise PentadError(f"tensor {name!r} has a name that safetensors cannot store: expected printable ASCII")
        if tensor.dtype not in DTYPES:
            raise PentadError(f"tensor {name} has dtype {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # wide dtypes first: all aligned
    specs: dict[str, Spec] = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in order
    }
    required = len(header(specs)) + num_bytes(specs.values())
    with storage_errors(folder, required):
        if os.path.lexists(folder / MANIFEST):
            raise PentadError(f"folder {folder} holds a committed checkpoint: expected one without {MANIFEST}")
        if free_bytes(folder) < required:  # fail before filling the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make_folder(folder)
        return write_tensors(folder / file, specs, (tensors[name] for name in order))


def dtype_of(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The dtype of a tensor that the checkpoint has."""
    file = checkpoint.files[name]
    try:
        with safe_open(checkpoint.folder / file, framework="pt") as shard:
            return _TORCH[shard.get_slice(name).get_dtype()]
    except (OSError, SafetensorError) as error:
        raise unreadable(f"checkpoint {checkpoint.folder}: {file}", error) from error


def read(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """These tensors, on the CPU in memory of their own. Raises PentadError for a name that the checkpoint lacks."""
    names = list(names)
    for name in names:
        if name not in checkpoint.files:
            raise PentadError(f"tensor {name} is not in checkpoint {checkpoint.folder}: expected it there")
    tensors = {}
    for file in sorted({checkpoint.files[name] for name in names}):
        try:
            with safe_open(checkpoint.folder / file, framework="pt") as shard:
                for name in (name for name in names if checkpoint.files[name] == file):
                    tensors[name] = shard.get_tensor(name).clone()  # not a view of the mapped file
        except (OSError, SafetensorError) as error:
            raise unreadable(f"checkpoint {checkpoint.folder}: {file}", error) from error
    return {name: tensors[name] for name in names}
