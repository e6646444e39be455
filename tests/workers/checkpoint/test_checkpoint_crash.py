"""A checkpoint is complete or ignored after a crash, a power cut or a storage failure at any point."""

import errno
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, folder_of, newest, open_checkpoint
from pentad.workers.checkpoint.retention import delete_checkpoint, delete_older
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.checkpoint.storage import storage_errors

Tree = dict[Path, bytes | None]  # contents by path, None for a folder


@dataclass
class Disk:
    """What a power cut would leave of `root`: file contents and directory entries as of their last fsync."""

    root: Path
    contents: dict[int, bytes] = field(default_factory=dict)  # by inode
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # entries, by inode of the folder
    folders: set[int] = field(default_factory=set)  # inodes
    events: list[str] = field(default_factory=list)
    crashes: list[Tree] = field(default_factory=list)

    def synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(status.st_mode):
            self.names[status.st_ino] = {child.name: child.lstat().st_ino for child in path.iterdir()}
            self.events.append(f"sync {path.name}/")
        else:
            self.contents[status.st_ino] = path.read_bytes()
            self.events.append(f"sync {'partial' if '.partial' in path.name else path.name}")

    def may_crash(self) -> None:
        """Adds the states of the disk that a crash may leave at this point.

        They are: everything as the process saw it (it was killed); only what was synced; every name but only synced
        contents; and names that reached the disk out of order, the manifest's first or last.
        """
        live = {path: path.lstat().st_ino for path in sorted(self.root.rglob("*"))}
        self.folders |= {inode for path, inode in live.items() if path.is_dir()}
        seen = {path: None if path.is_dir() else path.read_bytes() for path in live}
        unsynced = {path: None if path.is_dir() else self.contents.get(inode, b"") for path, inode in live.items()}
        synced = dict(self._synced_below(self.root, self.root.stat().st_ino))
        self.crashes += [seen, synced, unsynced, mixed(seen, synced), mixed(synced, seen)]

    def _synced_below(self, folder: Path, inode: int) -> Iterator[tuple[Path, bytes | None]]:
        for name, child in self.names.get(inode, {}).items():
            if child in self.folders:
                yield folder / name, None
                yield from self._synced_below(folder / name, child)
            else:
                yield folder / name, self.contents.get(child, b"")


def mixed(manifests: Tree, others: Tree) -> Tree:
    """A disk with the manifests of one disk and the other files of another."""
    return {path: data for path, data in others.items() if path.name != MANIFEST} | {
        path: data for path, data in manifests.items() if path.name == MANIFEST
    }


@contextmanager
def watched(disk: Disk) -> Iterator[None]:
    """Records what a crash would leave at every call that changes or syncs names or contents."""

    def syncing(call: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            disk.may_crash()
            call(descriptor)
            disk.synced(descriptor)
            disk.may_crash()

        return fsync

    def naming(word: str, call: Callable[..., None]) -> Callable[..., None]:
        def change(*paths: Any, **more: Any) -> None:
            disk.may_crash()
            call(*paths, **more)
            disk.events.append(f"{word} {Path(paths[-1]).name}")
            disk.may_crash()

        return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", syncing(os.fsync))
        for name in ("replace", "link"):
            patch.setattr(os, name, naming("name", getattr(os, name)))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, naming("delete", getattr(os, name)))
        yield


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A folder below `tmp_path` to watch."""
    (tmp_path / "run").mkdir()
    return Disk(tmp_path / "run")


def after_crashes(disk: Disk, tmp_path: Path) -> Iterator[Path]:
    """The checkpoint root of each disk that a crash may have left."""
    for number, tree in enumerate(disk.crashes):
        copy = tmp_path / f"copy-{number}"
        for path, data in tree.items():
            target = copy / path.relative_to(disk.root)
            (target if data is None else target.parent).mkdir(parents=True, exist_ok=True)
            if data is not None:
                target.write_bytes(data)
        yield copy / "checkpoints"


def found(root: Path) -> int | None:
    """The newest step, if any; fails if a checkpoint is damaged."""
    checkpoint, refused = newest(root)
    assert refused == ()
    return checkpoint.step if checkpoint else None


def test_a_power_cut_while_saving_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, disk: Disk) -> None:
    with watched(disk):
        save(disk.root / "checkpoints", 10)
        first = len(disk.crashes)
        save(disk.root / "checkpoints", 20)
    steps = [found(root) for root in after_crashes(disk, tmp_path)]
    assert set(steps[: first - 5]) == {None, 10}
    assert set(steps[first - 5 : first]) == {10}
    assert set(steps[first:]) == {10, 20}
    assert set(steps[-5:]) == {20}


def test_a_power_cut_while_deleting_leaves_no_damaged_checkpoint(tmp_path: Path, disk: Disk) -> None:
    with watched(disk):
        for step in (10, 20, 30):
            save(disk.root / "checkpoints", step)
        disk.crashes.clear()
        delete_older(disk.root / "checkpoints", keep=1)
    for root in after_crashes(disk, tmp_path):
        assert found(root) == 30
        for folder in root.iterdir():
            if (folder / MANIFEST).exists():
                open_checkpoint(folder)
    assert [folder.name for folder in root.iterdir()] == ["step-00000030"]


def test_contents_are_synced_before_names_and_the_manifest_comes_last(disk: Disk) -> None:
    with watched(disk):
        save(disk.root / "checkpoints", 20)
    events = ["delete partial" if event.startswith("delete .manifest.json.") else event for event in disk.events]
    assert events == [
        *("sync run/", "sync checkpoints/"),  # the names of the new folders
        *("sync partial", "name stage-0.safetensors", "sync step-00000020/"),
        "sync checkpoints/",  # a second rank cannot know whether the first one did this
        *("sync partial", "name stage-1.safetensors", "sync step-00000020/"),
        *("sync partial", "name manifest.json", "delete partial", "sync step-00000020/"),
    ]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("call", ["fsync", "replace", "link", "open"])
@pytest.mark.parametrize("at", range(9))
def test_a_storage_failure_at_any_call_leaves_a_valid_checkpoint_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    root = tmp_path / "checkpoints"
    save(root, 10)
    real, count = getattr(os, call), iter(range(100))

    def failing(*args: Any, **more: Any) -> Any:
        if next(count) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **more)

    reaches = {"fsync": 8, "replace": 2, "link": 1, "open": 8}[call] > at
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(PentadError, match=rf"{root}.*Input/output error") if reaches else nullcontext():
            save(root, 20)
    assert found(root) in (10, 20)
    assert not list(root.rglob(".*"))
    delete_checkpoint(folder_of(root, 20))
    save(root, 20)
    assert newest(root).checkpoint == open_checkpoint(folder_of(root, 20))


def test_a_file_system_without_fsync_of_folders_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    assert newest(save(tmp_path, 10).parent).checkpoint is not None


def test_a_crash_before_the_manifest_leaves_an_ignored_folder(tmp_path: Path) -> None:
    save(tmp_path, 10)
    write_shard(folder_of(tmp_path, 20), "stage-0.safetensors", {"x": torch.zeros(3)})
    assert found(tmp_path) == 10


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(PentadError, match=r"\(No space left.*\): expected room for 80\d\d bytes \(1000 free\)"):
        write_shard(folder_of(tmp_path, 1), "a.safetensors", {"x": torch.zeros(2000)})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_not_called_full(tmp_path: Path) -> None:
    said = r"\(Read-only file system\): expected a folder that can be written$"
    with pytest.raises(PentadError, match=said), storage_errors(tmp_path, 1):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_disk_that_fills_while_writing_holds_no_partial_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the kernel refuses the write, as for a quota
    try:
        with pytest.raises(PentadError, match=r"\(File too large\): expected room for 80\d+ bytes \(\d+ free\)"):
            write_shard(tmp_path, "a.safetensors", {"x": torch.zeros(2_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PentadError, match=r"cannot be written \(Not a directory\)"):
        write_shard(tmp_path / "file" / "step-00000001", "a.safetensors", {"x": torch.zeros(2)})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PentadError, match="Permission denied"):
        write_shard(folder_of(tmp_path, 1), "a.safetensors", {"x": torch.zeros(2)})
    tmp_path.chmod(0o700)
