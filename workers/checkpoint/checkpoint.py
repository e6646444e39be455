"""Checkpoints: each rank writes its shards (see shards), a manifest commits them, and opening verifies everything.

A checkpoint is a folder `step-00000020` of safetensors files and a `manifest.json`, written last. A folder without a
manifest is incomplete and ignored. Tensor names are global, so any mesh can read what another one wrote. Nothing here
unpickles: safetensors and JSON only. A storage failure raises PentadError, so that the driver can keep training.

Needs no torch: a driver resumes and recovers without it.
"""

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

from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import storage_errors, sync_folder, write_file
from pentad.workers.checkpoint.manifest import (
    MAX_BYTES,
    Manifest,
    Shard,
    UnknownVersion,
    decode,
    encode,
    files_by_tensor,
)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder, the number of steps done, the driver's metadata, and each tensor's file."""

    folder: Path
    step: int
    meta: dict[str, Any]
    files: dict[str, str]


class Start(NamedTuple):
    """What training starts from: a checkpoint (None: the initial values) whose `step` steps count as done, with its
    `optimizer` state or without."""

    folder: Path | None = None
    step: int = 0
    optimizer: bool = True


class Found(NamedTuple):
    """The newest valid checkpoint, if any, and each newer one that is damaged, newest first, with the reason."""

    checkpoint: Checkpoint | None
    refused: tuple[tuple[Path, str], ...]


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def commit(folder: Path, *, step: int, shards: Sequence[Shard], meta: dict[str, Any]) -> Path:
    """Makes the checkpoint visible by writing its manifest; returns the manifest's path.

    Call it after every rank's `write_shard` has returned; a second call with the same arguments changes nothing. Raises
    PentadError for a tensor or file that occurs twice, a shard that is missing or of another size, a `step` that is not
    the folder's, a `meta` that is not plain JSON, and a storage failure (the checkpoint may be visible after that, and
    is complete if it is).
    """
    with _naming(folder):
        data = encode(Manifest(step, meta, tuple(shards)))
        _check_step(folder, step)
        _check_sizes(folder, shards)
    with storage_errors(folder, len(data)):
        write_file(folder / MANIFEST, [memoryview(data)])
    return folder / MANIFEST


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads every byte of the checkpoint in `folder` and verifies it, several shards at a time.

    Checks the manifest's checksum, then each shard's presence, size, sha256 and header. Raises PentadError, which names
    the file at fault, and UnknownVersion for a checkpoint of another version of pentad.
    """
    with _naming(folder):
        manifest = decode(_manifest_bytes(folder))
        _check_step(folder, manifest.step)
        _check_sizes(folder, manifest.shards)
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            for _ in pool.map(lambda shard: _check_content(folder, shard), manifest.shards):
                pass
    return Checkpoint(folder, manifest.step, manifest.meta, files_by_tensor(manifest.shards))


def fingerprint(folder: Path) -> str:
    """The sha256 of a checkpoint's manifest, which has those of all its files."""
    with _naming(folder):
        return hashlib.sha256(_manifest_bytes(folder)).hexdigest()


def newest(root: Path) -> Found:
    """The valid checkpoint of the highest step under `root`, and newer damaged ones; incomplete ones do not count.

    Raises UnknownVersion at a checkpoint of another version: to skip it would silently lose its steps.
    """
    refused: list[tuple[Path, str]] = []
    for folder in reversed(_folders(root).values()):
        if not _is_complete(folder):
            continue
        try:
            return Found(open_checkpoint(folder), tuple(refused))
        except UnknownVersion:
            raise
        except PentadError as error:
            refused.append((folder, str(error)))
    return Found(None, tuple(refused))


def delete_checkpoint(folder: Path) -> None:
    """Deletes the checkpoint, complete or not, in `folder`, if it exists; manifest first, in case of a crash."""
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
        raise PentadError(
            f"checkpoint {folder} cannot be deleted ({error.strerror}): expected writable storage"
        ) from error


def delete_older(root: Path, keep: int, pinned: Sequence[int] = ()) -> tuple[Path, ...]:
    """Keeps the newest valid checkpoint, the `keep` - 1 complete ones before it, anything newer, and those of `pinned`
    steps; deletes the rest.

    Returns the deleted folders, oldest first. Deletes nothing unless it has read a newer checkpoint in full and found
    it valid.
    """
    if keep < 1:
        raise PentadError(f"checkpoint.keep is {keep}: expected at least 1")
    folders = _folders(root)
    complete = [step for step, folder in folders.items() if _is_complete(folder)]
    incomplete = folders.keys() - complete
    if not complete or (len(complete) <= keep and not any(step < complete[-1] for step in incomplete)):
        return ()
    found = newest(root).checkpoint
    if found is None:
        return ()
    kept = [step for step in complete if step < found.step][::-1][: keep - 1]
    deleted = tuple(folder for step, folder in folders.items() if step < found.step and step not in (*kept, *pinned))
    for folder in deleted:
        delete_checkpoint(folder)
    return deleted


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Errors of the block begin with the checkpoint's folder."""
    try:
        yield
    except PentadError as error:
        raise type(error)(f"checkpoint {folder}: {error}") from error.__cause__


def unreadable(file: str, error: OSError | SafetensorError) -> PentadError:
    return PentadError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): expected a readable file")


def _manifest_bytes(folder: Path) -> bytes:
    try:
        with open(folder / MANIFEST, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise PentadError(f"{MANIFEST} has {size} bytes: expected at most {MAX_BYTES}")
            return file.read()
    except OSError as error:
        raise unreadable(MANIFEST, error) from error


def _check_sizes(folder: Path, shards: Iterable[Shard]) -> None:
    for shard in shards:
        try:
            status = os.lstat(folder / shard.file)
        except OSError as error:
            raise unreadable(shard.file, error) from error
        if not stat.S_ISREG(status.st_mode):  # a link could lead out of the folder
            raise PentadError(f"{shard.file} is a link or device: expected a regular file")
        if status.st_size != shard.bytes:
            raise PentadError(f"{shard.file} has {status.st_size} bytes: expected {shard.bytes}")


def _check_content(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != shard.sha256:
            raise PentadError(f"{shard.file} has sha256 {sha256}: expected {shard.sha256}")
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            specs = {name: {"dtype": it.get_dtype(), "shape": list(it.get_shape())} for name, it in slices.items()}
    except (OSError, SafetensorError) as error:
        raise unreadable(shard.file, error) from error
    if specs != shard.tensors:
        raise PentadError(f"{shard.file} has tensors that differ from {MANIFEST}: expected the same names and shapes")


def _check_step(folder: Path, step: int) -> None:
    if _step_of(folder) not in (None, step):
        raise PentadError(f"step is {step}: expected {_step_of(folder)}, as in the folder's name")


def _step_of(folder: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match and folder == folder_of(folder.parent, int(match[1])) else None


def _folders(root: Path) -> dict[int, Path]:
    """Checkpoint folders under `root` by step, lowest first, including incomplete ones; links are ignored."""
    try:
        folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(f"folder {root}", error) from error
    steps = {step: path for path in folders if (step := _step_of(path)) is not None}
    return dict(sorted(steps.items()))


def _is_complete(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)
