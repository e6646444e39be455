"""Where a run's checkpoints are, and the small files that describe them: beside them, or in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import MOST_JSON, expanded, regular_file
from pentad.workers.checkpoint.atomic_io import free_bytes
from pentad.workers.checkpoint.checkpoint import MANIFEST, unreadable
from pentad.workers.checkpoint.location import Location, RemotePath, location
from pentad.workers.checkpoint.storage import read_bytes, storage_errors, storage_of
from pentad.workers.hf import kept_files
from pentad.workers.hf.names import MODEL_FILE

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
RECORD_BYTES = 2**20  # what a short run writes besides checkpoints
_copies: list[TemporaryDirectory[str]] = []  # kept until the process ends


def path_of(config: RunConfig) -> Path:
    return expanded(config.run.folder) / config.run.name


def checkpoints_of(config: RunConfig) -> Location:
    """Where a run has its checkpoints, as an absolute path: ranks may have another working directory."""
    given = config.checkpoint.path
    home = path_of(config) if given is None else location(given) / config.run.name
    return (home / CHECKPOINTS).absolute()


def checkpoints_in(home: Location) -> Location:
    """Where the run or import in the folder `home` has its checkpoints. Raises PentadError if a manifest there is not a
    regular file of acceptable size."""
    if isinstance(home, Path) and not (home / CHECKPOINTS).is_dir() and (home / CONFIG).is_file():
        config = saved_config(home)
        if config.checkpoint.path is not None:
            return checkpoints_of(config)
    root = home / CHECKPOINTS
    for manifest in root.glob(f"*/{MANIFEST}") if isinstance(root, Path) else ():
        regular_file(manifest, MOST_JSON)
    return root


def home_of(checkpoint: Location) -> Path:
    """A folder with the files that describe a checkpoint: that of its run or import, or a local copy of those in a
    store. Raises PentadError."""
    home = checkpoint.absolute().parent.parent
    return home if isinstance(home, Path) else _copy(home)


def are_elsewhere(config: RunConfig) -> bool:
    """Whether the checkpoints of a run are not in its folder."""
    return checkpoints_of(config).parent != path_of(config).absolute()


def stored_config(config: RunConfig) -> RunConfig | None:
    """The configuration stored beside the checkpoints of a run, if they are not in its folder."""
    if not are_elsewhere(config):
        return None
    folder = home_of(checkpoints_of(config) / "any")
    return saved_config(folder) if (folder / CONFIG).is_file() else None


def store_files(config: RunConfig, files: Mapping[str, bytes]) -> None:
    """Writes files that describe checkpoints beside them, if those are not in the run's folder. Raises PentadError."""
    if not are_elsewhere(config):
        return
    root = checkpoints_of(config)
    with storage_errors(root, sum(map(len, files.values()))):
        storage = storage_of(root)
        storage.make_folder(root)
        for name, content in files.items():
            storage.make_folder((root.parent / name).parent)
            storage.write(root.parent / name, [memoryview(content)])


def check_store(config: RunConfig) -> str | None:
    """Raises PentadError unless the run's checkpoints can be written at checkpoint.path. Returns a note if the store
    cannot refuse a second writer."""
    root = checkpoints_of(config)
    try:
        is_exclusive = storage_of(root).is_exclusive(root)
    except OSError as error:
        reason = f"which cannot be written ({error.strerror or error})"
        expected = "expected a store that can be reached, with the credentials in the environment"
        raise PentadError(f"checkpoint.path is '{config.checkpoint.path}', {reason}: {expected}") from None
    if is_exclusive:
        return None
    shown = root.public if isinstance(root, RemotePath) else root
    return f"{shown} cannot refuse a second writer of a checkpoint: no other run may write there"


def check_folder(config: RunConfig) -> None:
    """Raises PentadError if the run's path, or the nearest existing parent of it, is not a folder."""
    path = path_of(config).absolute()
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        fault = f"run.folder is '{config.run.folder}', where {nearest} is no folder"
        raise PentadError(f"{fault}: expected a folder of your own")


def check_room(config: RunConfig, checkpoint_bytes: int) -> str | None:
    """Raises PentadError unless the disk has room for the run's records. Returns a note if it has none for a
    checkpoint."""
    root, size = checkpoints_of(config), format_bytes(checkpoint_bytes)
    if (free := free_bytes(path_of(config))) < RECORD_BYTES:
        fault = f"run.folder is '{config.run.folder}', whose disk has {format_bytes(free)} free"
        records = f"{format_bytes(RECORD_BYTES)} for the run's records"
        raise PentadError(f"{fault}: expected {records}, and room for checkpoints of {size}")
    if (free := storage_of(root).free_bytes(root)) >= checkpoint_bytes + RECORD_BYTES:
        return None
    has = f"the disk of {root} has {format_bytes(free)} free"
    return f"a checkpoint takes {size}, and {has}: none is saved without more room"


def saved_config(path: Path) -> RunConfig:
    """The configuration of the last run in a folder. Raises PentadError if another version of pentad wrote it."""
    try:
        return load(path / CONFIG, [])
    except PentadError as error:
        problem = str(error).splitlines()[0]
        fault = f"is of another version of pentad ({problem})"
        raise PentadError(f"{path / CONFIG} {fault}: expected a run folder of this one") from None


def _copy(home: RemotePath) -> Path:
    """A temporary folder with copies of the files that describe the checkpoints in a store."""
    _copies.append(TemporaryDirectory(prefix="pentad-"))
    folder, kept = Path(_copies[-1].name), home / kept_files.FOLDER
    try:
        for place in (home, kept, *(kept / name for name in kept_files.SUBFOLDERS)):
            for name in storage_of(place).files(place):
                if place != home or name in (CONFIG, MODEL_FILE):
                    file = folder / place.path.removeprefix(home.path).strip("/") / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(read_bytes(place / name))
    except OSError as error:
        raise unreadable(str(home), error) from None
    return folder
