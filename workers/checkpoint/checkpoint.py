"""Checkpoints: each rank writes its shard, the driver commits with a manifest, anyone opens what is whole.

A checkpoint is a folder `step-00000020` of safetensors files and a `manifest.json`, written last. Without a manifest
the folder is torn, and invisible. Tensor names are global, so any mesh can read what another one wrote. Nothing here
unpickles: safetensors and JSON only. A failing storage raises PentadError, so that a driver can go on training.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import free_bytes, make_folder, storage, sync_folder, write_file
from pentad.workers.checkpoint.manifest import LIMIT, Manifest, Shard, Spec, decode, encode, is_file_name, where_each_is
from pentad.workers.checkpoint.safetensors_io import DTYPES, head

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder, step, the driver's JSON about it, and the file of each tensor."""

    folder: Path
    step: int
    meta: dict[str, Any]
    where: dict[str, str]


class Found(NamedTuple):
    """The newest valid checkpoint, if any, and each newer one that was refused, newest first, with the reason."""

    checkpoint: Checkpoint | None
    refused: tuple[tuple[Path, str], ...]


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives under `root`."""
    return root / f"step-{step:08d}"


def write_shard(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> Shard:
    """Writes `tensors`, of any device and layout, into `folder/file` as safetensors; whole and durable on return.

    They go through the host one at a time, so a GPU's shard never doubles in host memory; the caller must not change
    them meanwhile. PentadError, with nothing left behind, for a full or unwritable storage, a file or tensor name
    that cannot be one, a dtype that is not stored, and a folder that is already committed (`withdraw` it first).
    """
    if not is_file_name(file):
        raise PentadError(f"file is {file!r}: expected a plain name that ends in .safetensors")
    for name, tensor in tensors.items():
        if not (name.isascii() and name.isprintable()) or name in ("", "__metadata__"):
            raise PentadError(f"tensor {name!r} has a name that safetensors cannot keep: expected printable ASCII")
        if tensor.dtype not in DTYPES:
            raise PentadError(f"tensor {name} has dtype {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    specs: dict[str, Spec] = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in order
    }
    first = head(specs)
    expected = len(first) + sum(tensor.nbytes for tensor in tensors.values())
    with storage(folder, expected):
        if os.path.lexists(folder / MANIFEST):
            raise PentadError(f"folder {folder} holds a committed checkpoint: expected one without {MANIFEST}")
        if free_bytes(folder) < expected:  # so that a save that cannot fit does not fill the disk first
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make_folder(folder)
        size, sha256 = write_file(folder / file, _pieces(first, [tensors[name] for name in order]))
    return Shard(file, size, sha256, specs)


def commit(folder: Path, *, step: int, shards: Sequence[Shard], meta: dict[str, Any]) -> Path:
    """Makes the checkpoint visible: writes its manifest, last; returns the manifest's path.

    Call it once every rank's `write_shard` has returned; calling it again with the same arguments changes nothing.
    PentadError for a tensor or file named twice, a shard that is missing or of another size, a `step` that is not the
    folder's, a `meta` that is not plain JSON, and a failing storage (then the checkpoint may or may not be visible,
    and is whole if it is).
    """
    with _about(folder):
        data = encode(Manifest(step, meta, tuple(shards)))
        _check_step(folder, step)
        _check_sizes(folder, shards)
    with storage(folder, len(data)):
        write_file(folder / MANIFEST, [memoryview(data)])
    return folder / MANIFEST


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies the whole checkpoint in `folder`; PentadError names the file that is wrong.

    Verified before anything is returned: the manifest's checksum, then each shard's presence, size, sha256 and header.
    Reads every byte of it, several shards at a time.
    """
    with _about(folder):
        manifest = decode(_manifest_bytes(folder))
        _check_step(folder, manifest.step)
        _check_sizes(folder, manifest.shards)
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            for _ in pool.map(lambda shard: _check_content(folder, shard), manifest.shards):
                pass
    return Checkpoint(folder, manifest.step, manifest.meta, where_each_is(manifest.shards))


def newest(root: Path) -> Found:
    """The valid checkpoint of the highest step under `root`, and the newer ones refused; torn ones are invisible."""
    refused: list[tuple[Path, str]] = []
    for folder in reversed(_folders(root).values()):
        if not _is_complete(folder):
            continue
        try:
            return Found(open_checkpoint(folder), tuple(refused))
        except PentadError as error:
            refused.append((folder, str(error)))
    return Found(None, tuple(refused))


def read(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of `names`, on the CPU, in their own memory; PentadError for a name that the checkpoint lacks."""
    expected = list(names)
    for name in expected:
        if name not in checkpoint.where:
            raise PentadError(f"tensor {name} is not in checkpoint {checkpoint.folder}")
    tensors = {}
    for file in sorted({checkpoint.where[name] for name in expected}):
        try:
            with safe_open(checkpoint.folder / file, framework="pt") as shard:
                for name in (name for name in expected if checkpoint.where[name] == file):
                    tensors[name] = shard.get_tensor(name).clone()  # a view of the map would die with the file
        except (OSError, SafetensorError) as error:
            raise PentadError(f"checkpoint {checkpoint.folder}: {file} cannot be read: {error}") from error
    return {name: tensors[name] for name in expected}


def withdraw(folder: Path) -> None:
    """Deletes the checkpoint or torn folder `folder`, if there; its manifest first, so that a crash leaves it torn."""
    if _step_of(folder) is None or folder.is_symlink():
        raise PentadError(f"folder is {folder}: expected the step-00000000 folder of a checkpoint")
    if not os.path.lexists(folder):
        return
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise PentadError(f"checkpoint {folder} cannot be deleted: {error.strerror}") from error


def discard_older(root: Path, keep: int) -> tuple[Path, ...]:
    """Deletes all but the newest valid checkpoint, the `keep` - 1 complete ones before it and anything newer.

    Torn folders older than the newest valid one go too. With no valid one nothing is deleted. Returns what was
    deleted, oldest first. Reads the newest checkpoint in full, if there is anything to delete: nothing is destroyed
    on the strength of a checkpoint that was not read back.
    """
    if keep < 1:
        raise PentadError(f"keep is {keep}: expected at least 1")
    folders = _folders(root)
    complete = [step for step, folder in folders.items() if _is_complete(folder)]
    torn = folders.keys() - complete
    if not complete or (len(complete) <= keep and not any(step < complete[-1] for step in torn)):
        return ()
    found = newest(root).checkpoint
    if found is None:
        return ()
    kept = [step for step in complete if step < found.step][::-1][: keep - 1]
    gone = tuple(folder for step, folder in folders.items() if step < found.step and step not in kept)
    for folder in gone:
        withdraw(folder)
    return gone


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    try:
        yield
    except PentadError as error:
        raise PentadError(f"checkpoint {folder}: {error}") from error.__cause__


def _pieces(first: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(first)
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _manifest_bytes(folder: Path) -> bytes:
    try:
        with open(folder / MANIFEST, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LIMIT:
                raise PentadError(f"{MANIFEST} has {size} bytes: expected at most {LIMIT}")
            return file.read()
    except OSError as error:
        raise PentadError(f"{MANIFEST} cannot be read: {error.strerror}") from error


def _check_sizes(folder: Path, shards: Iterable[Shard]) -> None:
    for shard in shards:
        try:
            status = os.lstat(folder / shard.file)
        except OSError as error:
            raise PentadError(f"{shard.file} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # a link could lead out of the folder
            raise PentadError(f"{shard.file} is not a plain file")
        if status.st_size != shard.bytes:
            raise PentadError(f"{shard.file} has {status.st_size} bytes: expected {shard.bytes}")


def _check_content(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != shard.sha256:
            raise PentadError(f"{shard.file} has sha256 {sha256}: expected {shard.sha256}")
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            specs = {name: {"dtype": it.get_dtype(), "shape": list(it.get_shape())} for name, it in slices.items()}
    except (OSError, SafetensorError) as error:
        raise PentadError(f"{shard.file} cannot be read: {error}") from error
    if specs != shard.tensors:
        raise PentadError(f"{shard.file} has a header that differs from {MANIFEST}")


def _check_step(folder: Path, step: int) -> None:
    if _step_of(folder) not in (None, step):
        raise PentadError(f"step is {step}: expected {_step_of(folder)}, as the folder's name says")


def _step_of(folder: Path) -> int | None:
    """The step that a folder's name says; None if it is no checkpoint's name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match and folder == folder_of(folder.parent, int(match[1])) else None


def _folders(root: Path) -> dict[int, Path]:
    """The checkpoint folders under `root` by step, lowest first; torn ones too, links not."""
    try:
        inside = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PentadError(f"folder {root} cannot be read: {error.strerror}") from error
    steps = {step: path for path in inside if (step := _step_of(path)) is not None}
    return dict(sorted(steps.items()))


def _is_complete(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)
