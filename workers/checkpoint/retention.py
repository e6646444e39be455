"""Which checkpoints there are in a folder, in which state, and how those that are not kept are deleted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import sync_folder
from pentad.workers.checkpoint.checkpoint import (
    MANIFEST,
    Unreadable,
    committed,
    complete_folders,
    folders,
    is_intact,
    newest,
    open_checkpoint,
    read_manifest,
    retried,
    set_aside,
    step_of,
    unreadable,
)
from pentad.workers.checkpoint.manifest import UnknownVersion

_REFUSED = re.compile(r"(step-[0-9]{8,18})\.refused-[0-9]+")


class Entry(NamedTuple):
    """A checkpoint's folder: `time` is that of its manifest (Unix seconds), `state` is complete, incomplete (without a
    manifest: a run writes or has abandoned it), damaged, refused (damaged, and renamed because of that) or foreign (of
    another version of pentad); `problem` says what is wrong."""

    folder: Path
    step: int
    time: float
    bytes: int
    state: str
    problem: str = ""


def listed(root: Path) -> list[Entry]:
    """What is under `root`, by step. Reads manifests and sizes, no content. Raises Unreadable."""
    found = [_entry(folder, step) for step, folder in folders(root).items()]
    names = sorted(path.name for path in root.iterdir()) if found or root.is_dir() else []
    for match in filter(None, map(_REFUSED.fullmatch, names)):
        folder, step = root / match[0], step_of(root / match[1])
        if step is not None and folder.is_dir() and not folder.is_symlink():
            found.append(_entry(folder, step)._replace(state="refused"))
    return sorted(found, key=lambda entry: (entry.step, entry.folder.name))


def verified(entry: Entry) -> Entry:
    """The same with the state and problem that a comparison of every byte with its checksum finds."""
    try:
        open_checkpoint(entry.folder)
    except Unreadable:
        raise
    except PentadError as error:
        state = entry.state if entry.state != "complete" else "damaged"
        return entry._replace(state=state, problem=_problem(entry.folder, error))
    return entry


def superseded(root: Path, keep: int, pinned: Callable[[Collection[int]], Collection[int]]) -> list[Entry]:
    """What can be deleted while no run is live: the checkpoints that `delete_older` would delete with these `pinned`
    steps, of those saved, and incomplete ones of any step; damaged ones if they are older than an intact one.

    Raises PentadError if there are checkpoints and none is intact, UnknownVersion and Unreadable.
    """
    entries = listed(root)
    if not entries:
        return []
    found = newest(root).checkpoint
    if found is None:
        raise PentadError(f"no checkpoint in {root} is intact: expected one, or nothing is deleted")
    kept = {found.step, *_newest_intact(root, found.step, keep - 1), *pinned(committed(root))}
    return [
        entry
        for entry in entries
        if entry.state == "incomplete"
        or (entry.step <= found.step and entry.state in ("damaged", "refused"))
        or (entry.step < found.step and entry.state == "complete" and entry.step not in kept)
    ]


def delete_checkpoint(folder: Path) -> None:
    """Deletes the checkpoint, complete or not, in `folder`, if it exists; manifest first, in case of a crash."""
    if (step_of(folder) is None and not _REFUSED.fullmatch(folder.name)) or folder.is_symlink():
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
    """Keeps the newest valid checkpoint, the `keep` - 1 valid ones before it, anything newer, and those of `pinned`
    steps; deletes the rest, and renames newer ones that are damaged.

    Returns the deleted folders, oldest first. Deletes nothing unless it has read a newer checkpoint in full and found
    it valid.
    """
    if keep < 1:
        raise PentadError(f"checkpoint.keep is {keep}: expected at least 1")
    by_step, complete = folders(root), list(complete_folders(root))
    incomplete = by_step.keys() - complete
    if not complete or (len(complete) <= keep and not any(step < complete[-1] for step in incomplete)):
        return ()
    found, refused = newest(root)
    if found is None:
        return ()
    for folder, _ in refused:
        set_aside(folder)
    kept = {*_newest_intact(root, found.step, keep - 1), *pinned}
    deleted = tuple(folder for step, folder in by_step.items() if step < found.step and step not in kept)
    for folder in deleted:
        delete_checkpoint(folder)
    return deleted


def _newest_intact(root: Path, before: int, count: int) -> list[int]:
    """Steps of the newest valid checkpoints of fewer steps, at most so many."""
    older = ((step, folder) for step, folder in reversed(complete_folders(root).items()) if step < before)
    return list(islice((step for step, folder in older if is_intact(folder)), count))


def _entry(folder: Path, step: int) -> Entry:
    def state() -> tuple[float, int]:
        try:
            with os.scandir(folder) as files:
                sizes = {file.name: file.stat(follow_symlinks=False) for file in files}
            found = sizes.get(MANIFEST) or folder.stat()
        except OSError as error:
            raise unreadable(f"checkpoint {folder}", error) from error
        return found.st_mtime, sum(status.st_size for status in sizes.values())

    time, size = retried(state)
    if not os.path.lexists(folder / MANIFEST):
        return Entry(folder, step, time, size, "incomplete")
    try:
        read_manifest(folder)
    except Unreadable:
        raise
    except PentadError as error:
        name = "foreign" if isinstance(error, UnknownVersion) else "damaged"
        return Entry(folder, step, time, size, name, _problem(folder, error))
    return Entry(folder, step, time, size, "complete")


def _problem(folder: Path, error: PentadError) -> str:
    return str(error).removeprefix(f"checkpoint {folder}: ")
