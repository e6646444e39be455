"""Checkpoints: each rank writes its shards (see shards), a manifest commits them, and opening verifies everything.

A checkpoint is a folder `step-00000020` of safetensors files and a `manifest.json`, written last. A folder without a
manifest is incomplete and ignored. Tensor names are global, so any mesh can read what another one wrote. Nothing here
unpickles: safetensors and JSON only. A storage failure raises PentadError, so that the driver can keep training.

A checkpoint of a run counts if `committed` lists it. One whose content turns out to be damaged is renamed by whoever
may write to the run (`recover`, retention.delete_older), so that it counts nowhere and its step can be saved again.

Needs no torch: a driver resumes and recovers without it.
"""

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import storage_errors, write_file
from pentad.workers.checkpoint.manifest import (
    MAX_BYTES,
    Manifest,
    Piece,
    Shard,
    UnknownVersion,
    decode,
    encode,
    pieces_by_tensor,
)

MANIFEST = "manifest.json"
RETRY_SECONDS = (0.1, 0.5, 2.0)  # between attempts to read: a file server may be away for a moment
_SHOWS_DAMAGE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)  # the file is not there, or is none
_T = TypeVar("_T")
_FileState = tuple[int, int, int]  # inode, bytes, nanosecond of the last change
_verified: dict[Path, tuple[_FileState, ...]] = {}  # the files of checkpoints that this process has read and verified


class Unreadable(PentadError):
    """The system could not read a file (EIO, ESTALE, EMFILE, ...), which says nothing about its content."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its folder, the number of steps done, the driver's metadata, and where each tensor is."""

    folder: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, tuple[Piece, ...]]


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
    the file at fault, UnknownVersion for a checkpoint of another version of pentad, and Unreadable, after some
    attempts, when the system cannot read it.
    """
    manifest = read_manifest(folder)
    before = _file_states(folder, manifest)
    with _naming(folder), ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for _ in pool.map(lambda shard: retried(lambda: _check_content(folder, shard)), manifest.shards):
            pass
    _verified[folder] = before
    return _checkpoint(folder, manifest)


def open_verified(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, whose content has been verified elsewhere: by the driver, for all ranks. Raises as
    `read_manifest` does."""
    return _checkpoint(folder, read_manifest(folder))


def _checkpoint(folder: Path, manifest: Manifest) -> Checkpoint:
    return Checkpoint(folder, manifest.step, manifest.meta, pieces_by_tensor(manifest.shards))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, intact, whose shards are there and have their sizes; their content is not read.
    Raises as `open_checkpoint` does."""

    def read() -> Manifest:
        manifest = decode(_manifest_bytes(folder))
        _check_step(folder, manifest.step)
        _check_sizes(folder, manifest.shards)
        return manifest

    with _naming(folder):
        return retried(read)


def fingerprint(folder: Path) -> str:
    """The sha256 of a checkpoint's manifest, which has those of all its files."""
    with _naming(folder):
        return hashlib.sha256(_manifest_bytes(folder)).hexdigest()


def committed(root: Path) -> dict[int, Path]:
    """The folders of the checkpoints under `root` that count, by step, lowest first: `read_manifest` accepts them.

    Raises UnknownVersion and Unreadable: to leave out such a checkpoint would silently lose its steps.
    """
    found = {}
    for step, folder in complete_folders(root).items():
        try:
            read_manifest(folder)
        except (UnknownVersion, Unreadable):
            raise
        except PentadError:
            continue
        found[step] = folder
    return found


def has_manifests(root: Path) -> bool:
    """Whether there is a checkpoint under `root`, intact or not. Raises Unreadable."""
    return bool(complete_folders(root))


def newest(root: Path) -> Found:
    """The valid checkpoint of the highest step under `root`, and newer damaged ones; incomplete ones do not count.

    Raises UnknownVersion and Unreadable at such a checkpoint: to skip it would silently lose its steps.
    """
    refused: list[tuple[Path, str]] = []
    for folder in reversed(complete_folders(root).values()):
        try:
            return Found(open_checkpoint(folder), tuple(refused))
        except (UnknownVersion, Unreadable):
            raise
        except PentadError as error:
            refused.append((folder, str(error)))
    return Found(None, tuple(refused))


def recover(root: Path, *, restart: bool = False) -> Found:
    """`newest`, with the damaged ones renamed, so that they no longer count.

    Raises PentadError, with nothing renamed, if there are checkpoints and all are damaged, unless `restart`.
    """
    found = newest(root)
    if found.checkpoint is None and found.refused and not restart:
        expected = "expected an intact one, or checkpoint.restart_if_damaged = true to begin the run again"
        raise PentadError(f"no checkpoint in {root} is intact ({found.refused[0][1]}): {expected}")
    return found._replace(refused=tuple((set_aside(folder), reason) for folder, reason in found.refused))


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Errors of the block begin with the checkpoint's folder."""
    try:
        yield
    except PentadError as error:
        raise type(error)(f"checkpoint {folder}: {error}") from error.__cause__


def unreadable(file: str, error: OSError | SafetensorError) -> PentadError:
    """Unreadable, unless the error shows that the file is damaged or missing."""
    is_passing = isinstance(error, OSError) and error.errno not in _SHOWS_DAMAGE
    reason = getattr(error, "strerror", None) or error
    return (Unreadable if is_passing else PentadError)(f"{file} cannot be read ({reason}): expected a readable file")


def retried(read: Callable[[], _T]) -> _T:
    """What `read` returns, if it raises Unreadable after some more attempts."""
    for seconds in RETRY_SECONDS:
        with suppress(Unreadable):
            return read()
        time.sleep(seconds)
    return read()


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint to the first free name of the form step-00000020.refused-1."""
    names = (folder.with_name(f"{folder.name}.refused-{number}") for number in count(1))
    aside = next(path for path in names if not os.path.lexists(path))
    try:
        return folder.rename(aside)
    except OSError as error:
        raise PentadError(f"{folder} cannot be renamed ({error.strerror}): expected writable storage") from error


def is_intact(folder: Path) -> bool:
    """Whether the checkpoint is valid; its content is not read again while its files have not changed."""
    try:
        if _file_states(folder, read_manifest(folder)) != _verified.get(folder):
            open_checkpoint(folder)
    except (UnknownVersion, Unreadable):
        raise
    except PentadError:
        return False
    return True


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


def _file_states(folder: Path, manifest: Manifest) -> tuple[_FileState, ...]:
    def read() -> tuple[_FileState, ...]:
        try:
            found = [os.lstat(folder / file) for file in (MANIFEST, *(shard.file for shard in manifest.shards))]
        except OSError as error:
            raise unreadable("a file", error) from error
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)

    with _naming(folder):
        return retried(read)


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
    if step_of(folder) not in (None, step):
        raise PentadError(f"step is {step}: expected {step_of(folder)}, as in the folder's name")


def step_of(folder: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match and folder == folder_of(folder.parent, int(match[1])) else None


def folders(root: Path) -> dict[int, Path]:
    """Checkpoint folders under `root` by step, lowest first, including incomplete ones; links are ignored."""

    def read() -> list[Path]:
        try:
            with os.scandir(root) as entries:
                return [root / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(f"folder {root}", error) from error

    steps = {step: path for path in retried(read) if (step := step_of(path)) is not None}
    return dict(sorted(steps.items()))


def complete_folders(root: Path) -> dict[int, Path]:
    """Those with a manifest, of `folders`."""
    return {step: folder for step, folder in folders(root).items() if retried(partial(_has_manifest, folder))}


def _has_manifest(folder: Path) -> bool:
    try:
        os.lstat(folder / MANIFEST)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(f"checkpoint {folder}: {MANIFEST}", error) from error
    return True
