"""Lists the checkpoints in a folder with their states, and deletes those that are not kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import (
    Unreadable,
    committed,
    complete_folders,
    folders,
    manifest_name,
    newest,
    open_checkpoint,
    open_saved,
    read_manifest,
    retried,
    set_aside,
    step_of,
    unreadable,
)
from pentad.workers.checkpoint.local_storage import File, L
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import UnknownVersion
from pentad.workers.checkpoint.storage import storage_of

_REFUSED = re.compile(r"(step-[0-9]{8,18})\.refused-[0-9]+")
_MANIFEST = re.compile(r"manifest(-[0-9]+)?\.json")
_REFUSED_MANIFEST = re.compile(rf"{_MANIFEST.pattern}\.refused-[0-9]+")
_LEFT = re.compile(rf".*\.(safetensors|partial)|{_REFUSED_MANIFEST.pattern}")  # files that a manifest should list


class CheckpointEntry(NamedTuple):
    """A checkpoint's folder: `time` is the time of its manifest (Unix seconds). `state` is complete, incomplete
    (without a manifest: a run is writing or has abandoned it), damaged, refused (damaged, and renamed for that reason)
    or foreign (written by another version of pentad); `problem` says what is wrong."""

    folder: Location
    step: int
    time: float
    bytes: int
    state: str
    problem: str = ""


def listed(root: Location) -> list[CheckpointEntry]:
    """The checkpoints under `root`, by step. Reads manifests and sizes, no content. Raises Unreadable."""

    def names() -> list[str]:
        with _reading(f"folder {root}"):
            return storage_of(root).folders(root)

    found = []
    for name in retried(names):
        refused = _REFUSED.fullmatch(name)
        step = step_of(root / (refused[1] if refused else name))
        if step is not None:
            entry = _entry(root / name, step)
            found.append(entry._replace(state="refused") if refused else entry)
    return sorted(found, key=lambda entry: (entry.step, entry.folder.name))


def verified(entry: CheckpointEntry) -> CheckpointEntry:
    """The entry, with the state and problem found by comparing every byte with its checksum."""
    try:
        open_checkpoint(entry.folder)
    except Unreadable:
        raise
    except PentadError as error:
        state = entry.state if entry.state != "complete" else "damaged"
        return entry._replace(state=state, problem=_problem(entry.folder, error))
    return entry


def superseded(
    root: Location, keep: int, pinned: Callable[[Collection[int]], Collection[int]]
) -> list[CheckpointEntry]:
    """What can be deleted while no run is live: the checkpoints that `delete_older` would delete, with the steps that
    `pinned` picks from the committed ones; incomplete checkpoints of any step that nobody is writing; and damaged ones
    that are older than an intact one.

    Raises PentadError if there are checkpoints but none is intact, UnknownVersion and Unreadable.
    """
    entries = listed(root)
    if not entries:
        return []
    found = newest(root).checkpoint
    if found is None:
        raise PentadError(f"no checkpoint in {root} is intact: expected one, or nothing is deleted")
    kept = {found.step, *_newest_intact(root, found.step, keep - 1), *pinned(committed(root))}
    kept |= {entry.step for entry in entries if entry.state == "complete" and _is_imported(entry.folder)}
    return [
        entry
        for entry in entries
        if (entry.state == "incomplete" and entry.time <= _abandoned_before(root))
        or (entry.step <= found.step and entry.state in ("damaged", "refused"))
        or (entry.step < found.step and entry.state == "complete" and entry.step not in kept)
    ]


def delete_checkpoint(folder: Location) -> None:
    """Deletes the checkpoint in `folder`, complete or not, if it exists; the manifest goes first, in case of a
    crash."""
    is_link = isinstance(folder, Path) and folder.is_symlink()
    if (step_of(folder) is None and not _REFUSED.fullmatch(folder.name)) or is_link:
        raise PentadError(f"folder is {folder}: expected the step-00000000 folder of a checkpoint")
    try:
        storage = storage_of(folder)
        storage.delete(folder, first=list(filter(_MANIFEST.fullmatch, storage.files(folder))))
    except OSError as error:
        raise _undeletable(folder, error) from error


def discard(folder: Location) -> None:
    """Deletes what this run has written of a checkpoint that has been given up: the current files, unless they are
    committed. In a store this is left to `delete_older`, since files of another writer may be there."""
    try:
        storage = storage_of(folder)
        files = storage.files(folder) if storage.grace_seconds == 0 else {}
        if manifest_name(files) is None:
            storage.delete_files(folder, files)
    except OSError as error:
        raise _undeletable(folder, error) from error


def delete_older(root: L, keep: int, pinned: Sequence[int] = ()) -> tuple[L, ...]:
    """Keeps the newest valid checkpoint, the `keep` - 1 valid ones before it, anything newer, those of `pinned` steps,
    and imports; deletes the rest, and renames newer ones that are damaged. In the checkpoints that stay, it also
    deletes what failed saves have left, once nobody can be writing it.

    Returns the deleted folders, oldest first. Deletes nothing unless it has opened a newer checkpoint with `open_saved`
    and found it valid.
    """
    if keep < 1:
        raise PentadError(f"checkpoint.keep is {keep}: expected at least 1")
    deleted = _delete_older(root, keep, pinned)
    _sweep(root)
    return deleted


def _delete_older(root: L, keep: int, pinned: Sequence[int]) -> tuple[L, ...]:
    by_step, complete = folders(root), list(complete_folders(root))
    incomplete = by_step.keys() - complete
    if not complete or (len(complete) <= keep and not any(step < complete[-1] for step in incomplete)):
        return ()
    found = newest(root, open_saved)
    if found.checkpoint is None:
        return ()
    for damaged, _ in found.refused:
        set_aside(damaged)
    last: int = found.checkpoint.step
    kept = {*_newest_intact(root, last, keep - 1), *pinned}
    kept |= {step for step in incomplete if _entry(by_step[step], step).time > _abandoned_before(root)}
    old = (folder for step, folder in by_step.items() if step < last and step not in kept)
    deleted = tuple(folder for folder in old if not _is_imported(folder))
    for folder in deleted:
        delete_checkpoint(folder)
    return deleted


def _is_imported(folder: Location) -> bool:
    """Whether the checkpoint was imported: no training made it, and none can make it again."""
    try:
        return "model" in read_manifest(folder).meta  # a run has its model in its configuration instead
    except Unreadable:
        raise
    except PentadError:
        return False


def _sweep(root: Location) -> None:
    """Deletes files in checkpoint folders that belong to no checkpoint, and aborts unfinished uploads, if nobody can be
    writing them."""
    storage, before = storage_of(root), _abandoned_before(root)
    for folder in committed(root).values():
        expected = {shard.file for shard in read_manifest(folder).shards}
        with _reading(f"checkpoint {folder}"):
            files = storage.files(folder)
        old = {name for name, file in files.items() if _LEFT.fullmatch(name) and file.time < before}
        try:
            storage.delete_files(folder, old - expected)
        except OSError as error:
            raise _undeletable(folder, error) from error
    with _reading(f"folder {root}"):
        storage.sweep(root, before)


def _abandoned_before(root: Location) -> float:
    """Unix time in seconds; an older file that no manifest lists is abandoned."""
    return time.time() - storage_of(root).grace_seconds


def _newest_intact(root: Location, before: int, count: int) -> list[int]:
    """Steps of the newest valid checkpoints before step `before`, at most `count`."""
    older = ((step, folder) for step, folder in reversed(complete_folders(root).items()) if step < before)
    return list(islice((step for step, folder in older if _is_intact(folder)), count))


def _is_intact(folder: Location) -> bool:
    """Whether `open_saved` accepts the checkpoint."""
    try:
        open_saved(folder)
    except (UnknownVersion, Unreadable):
        raise
    except PentadError:
        return False
    return True


def _entry(folder: Location, step: int) -> CheckpointEntry:
    def read() -> dict[str, File]:
        with _reading(f"checkpoint {folder}"):
            return storage_of(folder).files(folder)

    files = retried(read)
    manifest, size = manifest_name(files), sum(file.bytes for file in files.values())
    if manifest is None:
        state = "refused" if any(map(_REFUSED_MANIFEST.fullmatch, files)) else "incomplete"
        return CheckpointEntry(folder, step, max((file.time for file in files.values()), default=0.0), size, state)
    entry = CheckpointEntry(folder, step, files[manifest].time, size, "complete")
    try:
        read_manifest(folder)
    except Unreadable:
        raise
    except PentadError as error:
        state = "foreign" if isinstance(error, UnknownVersion) else "damaged"
        return entry._replace(state=state, problem=_problem(folder, error))
    return entry


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(what, error) from error


def _undeletable(folder: Location, error: OSError) -> PentadError:
    reason = error.strerror or error
    return PentadError(f"checkpoint {folder} cannot be deleted ({reason}): expected writable storage")


def _problem(folder: Location, error: PentadError) -> str:
    return str(error).removeprefix(f"checkpoint {folder}: ")
