"""Checkpoints: each rank writes its shards (see shards), a manifest commits them, and whoever opens one verifies it:
all of it (`open_checkpoint`), or what is read of it (`open_checked`).

A checkpoint is a folder `step-00000020` of safetensors files and a `manifest.json`, written last, on a disk or in a
store. A folder without a manifest is incomplete and ignored. Tensor names are global, so any mesh can read what another
one wrote. Nothing here unpickles: safetensors and JSON only. A storage failure raises PentadError, so that the driver
can keep training.

Of two writers of the same step, the one whose manifest comes first wins. In a store that would let the second one
replace it, manifests have the generation of their run in their names, and the highest one counts.

A checkpoint of a run counts if `committed` lists it. One whose content turns out to be damaged is renamed by whoever
may write to the run (`recover`, retention.delete_older), so that it counts nowhere and its step can be saved again.
Needs no torch: a driver resumes and recovers without it.
"""

import errno
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checksums import CheckedFile, Damaged
from pentad.workers.checkpoint.local_storage import File, L, Publishing, missing, sha256_of
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import (
    MAX_BYTES,
    Manifest,
    Shard,
    StoredPart,
    UnknownVersion,
    decode,
    encode,
    pieces_by_tensor,
)
from pentad.workers.checkpoint.safetensors_header import Stored, stored_tensors
from pentad.workers.checkpoint.storage import storage_errors, storage_of

MANIFEST = "manifest.json"
RETRY_SECONDS = (0.1, 0.5, 2.0)  # between attempts to read: a file server may be away briefly
_SHOWS_DAMAGE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)  # the file does not exist, or is not a file
_T = TypeVar("_T")
_OF_GENERATION = re.compile(r"manifest-[0-9]{8,18}\.json")
_verified: dict[Location, dict[str, File]] = {}  # the files of checkpoints that this process has read and verified


class Unreadable(PentadError):
    """The system could not read a file (EIO, ESTALE, EMFILE, ...), which says nothing about its content."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its folder, the number of steps done, the driver's metadata, and where each tensor is. `opened`
    opens its files; None: directly from the folder."""

    folder: Location
    step: int
    meta: dict[str, Any]
    tensors: dict[str, tuple[StoredPart, ...]]
    headers: dict[str, dict[str, Stored]] = field(default_factory=dict, compare=False, repr=False)  # of files read from
    opened: Callable[[str], AbstractContextManager[Any]] | None = field(default=None, compare=False, repr=False)


class Start(NamedTuple):
    """What training starts from: a checkpoint (None: the initial values) whose `step` steps count as done, with or
    without its `optimizer` state."""

    folder: Location | None = None
    step: int = 0
    optimizer: bool = True


class NewestCheckpoint(NamedTuple):
    """The newest valid checkpoint, if any, and each newer one that is damaged, newest first, with the reason."""

    checkpoint: Checkpoint | None
    refused: tuple[tuple[Location, str], ...]


def folder_of(root: L, step: int) -> L:
    """The folder of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def commit(
    folder: L, *, step: int, shards: Sequence[Shard], meta: dict[str, Any], publishing: Publishing = nullcontext
) -> L:
    """Makes the checkpoint visible by writing its manifest, within `publishing()`; returns the manifest's place.

    Call it after every rank's `write_shard` has returned; a second call with the same arguments changes nothing. Raises
    PentadError for a tensor or file that occurs twice, a shard that is missing or of another size, a `step` that is not
    the folder's, a `meta` that is not plain JSON, and a checkpoint that another writer has committed meanwhile (one of
    an earlier generation is replaced instead). Also raises it for a storage failure, after which the checkpoint may be
    visible, and is complete if it is.
    """
    with _naming(folder):
        data = encode(Manifest(step, meta, tuple(shards)))
        _check_step(folder, step)
        _check_sizes(retried(lambda: _files(folder)), shards)
    with storage_errors(folder, len(data)):
        storage = storage_of(folder)
        name = MANIFEST if storage.is_exclusive(folder.parent) else f"manifest-{meta.get('generation', 0):08d}.json"
        try:
            storage.write_new(folder / name, data, publishing)
        except FileExistsError:
            if not _is_stale(folder, name, meta):
                text = f"checkpoint {folder}: another writer has committed it: expected one writer"
                raise PentadError(text) from None
            with publishing():
                storage.delete_files(folder, [name])
            storage.write_new(folder / name, data, publishing)
    return folder / name


def _is_stale(folder: Location, name: str, meta: dict[str, Any]) -> bool:
    """Whether a manifest in a folder is from an earlier generation of the run: the run has gone back since, and a rank
    that nobody could reach committed it afterwards."""
    found = decode(_manifest_bytes(folder, name, _files(folder))).meta
    return found.get("run") == meta.get("run") and found.get("generation", 0) < meta.get("generation", 0)


def open_checkpoint(folder: Location) -> Checkpoint:
    """Reads every byte of the checkpoint in `folder` and verifies it, several shards at a time.

    Checks the manifest's checksum, then each shard's presence, size, sha256 and header. Raises PentadError, naming the
    file at fault; UnknownVersion for a checkpoint of another version of pentad; and Unreadable, after several attempts,
    if the system cannot read it.
    """
    manifest, before = _read_manifest(folder)
    with _naming(folder), ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for _ in pool.map(lambda shard: retried(lambda: _check_content(folder, shard)), manifest.shards):
            pass
    _verified[folder] = before
    return _checkpoint(folder, manifest)


def open_checked(folder: Location) -> Checkpoint:
    """The checkpoint in `folder`, whose content is checked against its checksums as it is read; a mismatch raises
    Damaged. Raises as `read_manifest` does."""
    manifest = read_manifest(folder)
    files = _CheckedFiles(folder, {shard.file: shard for shard in manifest.shards})
    return replace(_checkpoint(folder, manifest), opened=files.open)


class _CheckedFiles:
    """Opens the files of a checkpoint, from any thread. Files of earlier versions, which have no block checksums, are
    verified in full when they are first opened."""

    def __init__(self, folder: Location, shards: dict[str, Shard]) -> None:
        self.folder, self.shards, self.lock, self.intact = folder, shards, Lock(), set[str]()

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        shard = self.shards[name]
        with self.lock:
            if not shard.crc32 and name not in self.intact:
                _check_content(self.folder, shard)
                self.intact.add(name)
        with storage_of(self.folder).opened(self.folder / name) as file:
            yield CheckedFile(file, name, shard.bytes, shard.crc32) if shard.crc32 else file


def open_saved(folder: Location) -> Checkpoint:
    """A checkpoint that has been saved, verified as far as its storage gives reason to: the content is read if bytes
    may rot there, unless this process has verified the same files. Raises as `open_checkpoint` does."""
    manifest, files = _read_manifest(folder)
    if _may_rot(folder) and files != _verified.get(folder):
        return open_checkpoint(folder)
    return _checkpoint(folder, manifest)


def _may_rot(folder: Location) -> bool:
    try:
        return storage_of(folder).may_rot
    except OSError as error:
        raise unreadable(str(folder), error) from error


def _checkpoint(folder: Location, manifest: Manifest) -> Checkpoint:
    return Checkpoint(folder, manifest.step, manifest.meta, pieces_by_tensor(manifest.shards))


def read_manifest(folder: Location) -> Manifest:
    """The manifest of a checkpoint: it is intact, and the shards exist and have their sizes; their content is not read.
    Raises as `open_checkpoint` does."""
    return _read_manifest(folder)[0]


def _read_manifest(folder: Location) -> tuple[Manifest, dict[str, File]]:
    """The manifest, and its file and those of its shards."""

    def read() -> tuple[Manifest, dict[str, File]]:
        files = _files(folder)
        name = manifest_name(files) or MANIFEST
        manifest = decode(_manifest_bytes(folder, name, files))
        _check_step(folder, manifest.step)
        _check_sizes(files, manifest.shards)
        return manifest, {each: files[each] for each in (name, *(shard.file for shard in manifest.shards))}

    with _naming(folder):
        return retried(read)


def fingerprint(folder: Location) -> str:
    """The sha256 of a checkpoint's manifest, which contains the sha256 of every other file."""

    def read() -> str:
        files = _files(folder)
        return hashlib.sha256(_manifest_bytes(folder, manifest_name(files) or MANIFEST, files)).hexdigest()

    with _naming(folder):
        return retried(read)


def manifest_name(files: Iterable[str]) -> str | None:
    """The name of the manifest that counts, among the names of a folder's files."""
    names = set(files)
    return MANIFEST if MANIFEST in names else max(filter(_OF_GENERATION.fullmatch, names), key=_by_number, default=None)


def _by_number(name: str) -> int:
    return int(name[len("manifest-") : -len(".json")])


def committed(root: L) -> dict[int, L]:
    """The folders of the checkpoints under `root` that count, by step, lowest first: those that `read_manifest`
    accepts.

    Raises UnknownVersion and Unreadable: leaving out such a checkpoint would silently lose its steps.
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


def has_manifests(root: Location) -> bool:
    """Whether there is a checkpoint under `root`, intact or not. Raises Unreadable."""
    return bool(complete_folders(root))


def newest(root: Location, open_: Callable[[Location], Checkpoint] = open_checkpoint) -> NewestCheckpoint:
    """The valid checkpoint of the highest step under `root`, and newer damaged ones; incomplete ones do not count. A
    checkpoint is valid unless `open_` refuses it.

    Raises UnknownVersion and Unreadable for such a checkpoint: skipping it would silently lose its steps.
    """
    refused: list[tuple[Location, str]] = []
    for folder in reversed(complete_folders(root).values()):
        try:
            return NewestCheckpoint(open_(folder), tuple(refused))
        except (UnknownVersion, Unreadable):
            raise
        except PentadError as error:
            refused.append((folder, str(error)))
    return NewestCheckpoint(None, tuple(refused))


def recover(
    root: Location, restart: bool = False, open_: Callable[[Location], Checkpoint] = open_checkpoint
) -> NewestCheckpoint:
    """`newest`, with the damaged ones renamed, so that they no longer count.

    Raises PentadError, without renaming any, if there are checkpoints but all are damaged, unless `restart`.
    """
    found = newest(root, open_)
    if found.checkpoint is None and found.refused and not restart:
        expected = "expected an intact one, or checkpoint.restart_if_damaged = true to begin the run again"
        raise PentadError(f"no checkpoint in {root} is intact ({found.refused[0][1]}): {expected}")
    return found._replace(refused=tuple((set_aside(folder), reason) for folder, reason in found.refused))


@contextmanager
def _naming(folder: Location) -> Iterator[None]:
    """Prefixes errors raised in the block with the checkpoint's folder."""
    try:
        yield
    except PentadError as error:
        raise type(error)(f"checkpoint {folder}: {error}") from error.__cause__


def unreadable(file: str, error: OSError) -> PentadError:
    """Unreadable, or Damaged if the error shows that the file is damaged or missing."""
    is_passing, reason = error.errno not in _SHOWS_DAMAGE, error.strerror or error
    return (Unreadable if is_passing else Damaged)(f"{file} cannot be read ({reason}): expected a readable file")


def retried(read: Callable[[], _T]) -> _T:
    """What `read` returns; tries a few more times if it raises Unreadable."""
    for seconds in RETRY_SECONDS:
        with suppress(Unreadable):
            return read()
        time.sleep(seconds)
    return read()


def set_aside(folder: L) -> L:
    """Renames a damaged checkpoint or, in a store, its manifest, so that it no longer counts, to the first free name of
    the form step-00000020.refused-1."""
    try:
        storage = storage_of(folder)
        aside: L = storage.set_aside(folder, manifest_name(storage.files(folder)) or MANIFEST)
        return aside
    except OSError as error:
        text = f"{folder} cannot be renamed ({error.strerror or error})"
        raise PentadError(f"{text}: expected writable storage") from error


def _files(folder: Location) -> dict[str, File]:
    try:
        return storage_of(folder).files(folder)
    except OSError as error:
        raise unreadable("the folder", error) from error


def _manifest_bytes(folder: Location, name: str, files: dict[str, File]) -> bytes:
    try:
        if name not in files:
            raise missing(name)
        with storage_of(folder).opened(folder / name) as file:
            if files[name].bytes > MAX_BYTES:
                raise PentadError(f"{name} has {files[name].bytes} bytes: expected at most {MAX_BYTES}")
            return bytes(file.read())
    except OSError as error:
        raise unreadable(name, error) from error


def _check_sizes(files: dict[str, File], shards: Iterable[Shard]) -> None:
    for shard in shards:
        found = files.get(shard.file)
        if found is None:
            raise unreadable(shard.file, missing(shard.file))
        if not found.is_regular:  # a link could lead out of the folder
            raise PentadError(f"{shard.file} is a link or device: expected a regular file")
        if found.bytes != shard.bytes:
            raise PentadError(f"{shard.file} has {found.bytes} bytes: expected {shard.bytes}")


def _check_content(folder: Location, shard: Shard) -> None:
    try:
        with storage_of(folder).opened(folder / shard.file) as file:
            sha256 = sha256_of(file)
            if sha256 != shard.sha256:
                raise Damaged(f"{shard.file} has sha256 {sha256}: expected {shard.sha256}")
            file.seek(0)
            specs = {name: stored.spec for name, stored in stored_tensors(file, shard.file, shard.bytes).items()}
    except OSError as error:
        raise unreadable(shard.file, error) from error
    if specs != shard.tensors:
        raise Damaged(f"{shard.file} has tensors that differ from {MANIFEST}: expected the same names and shapes")


def _check_step(folder: Location, step: int) -> None:
    if step_of(folder) not in (None, step):
        raise PentadError(f"step is {step}: expected {step_of(folder)}, as in the folder's name")


def step_of(folder: Location) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match and folder == folder_of(folder.parent, int(match[1])) else None


def folders(root: L) -> dict[int, L]:
    """Checkpoint folders under `root` by step, lowest first, including incomplete ones; links are ignored."""

    def read() -> list[str]:
        try:
            return storage_of(root).folders(root)
        except OSError as error:
            raise unreadable(f"folder {root}", error) from error

    steps = {step: root / name for name in retried(read) if (step := step_of(root / name)) is not None}
    return dict(sorted(steps.items()))


def complete_folders(root: L) -> dict[int, L]:
    """The `folders` that have a manifest."""
    return {step: folder for step, folder in folders(root).items() if has_manifest(folder)}


def has_manifest(folder: Location) -> bool:
    """Whether there is a checkpoint in the folder, intact or not. Raises Unreadable."""
    with _naming(folder):
        return manifest_name(retried(partial(_files, folder))) is not None
