"""What a folder of checkpoints holds, and what of it can be deleted."""

import errno
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from checkpoints import flip, save

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, folder_of, read_manifest, recover
from pentad.workers.checkpoint.local_storage import Local
from pentad.workers.checkpoint.retention import (
    CheckpointEntry,
    delete_checkpoint,
    delete_older,
    discard,
    listed,
    superseded,
    verified,
)

SHARD = "stage-0.safetensors"


def states(entries: Collection[CheckpointEntry]) -> list[tuple[int, str]]:
    return [(entry.step, entry.state) for entry in entries]


def nothing(saved: Collection[int]) -> Collection[int]:
    return ()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 to 60 by 10: 20 without a manifest, 30 with a byte changed, 40 renamed because of that, 60 truncated."""
    for step in range(10, 70, 10):
        save(tmp_path, step)
    (folder_of(tmp_path, 20) / MANIFEST).unlink()
    flip(folder_of(tmp_path, 30) / SHARD, -1)
    folder_of(tmp_path, 40).rename(tmp_path / "step-00000040.refused-1")
    shard = folder_of(tmp_path, 60) / SHARD
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "step-00000070").symlink_to(folder_of(tmp_path, 10))
    (tmp_path / "mine").mkdir()
    return tmp_path


def test_every_checkpoint_is_listed_with_its_state_without_reading_content(root: Path) -> None:
    entries = listed(root)
    assert states(entries) == [
        (10, "complete"), (20, "incomplete"), (30, "complete"), (40, "refused"), (50, "complete"), (60, "damaged"),
    ]  # fmt: skip
    assert entries[5].problem.startswith(f"{SHARD} has ")
    for entry in entries:
        assert entry.bytes == sum(path.stat().st_size for path in (root / entry.folder.name).iterdir())
    assert entries[0].time == (folder_of(root, 10) / MANIFEST).stat().st_mtime


def test_verification_names_the_first_broken_file(root: Path) -> None:
    found = {entry.step: verified(entry) for entry in listed(root)}
    assert found[10].state == found[50].state == "complete"
    assert found[30].state == "damaged" and found[30].problem.startswith(f"{SHARD} has sha256 ")
    assert found[60].state == "damaged" and found[60].problem.startswith(f"{SHARD} has ")
    assert found[20].problem.startswith(MANIFEST) and found[20].state == "incomplete"


@pytest.mark.parametrize(
    ("keep", "pinned", "gone"),
    [(1, (), [10, 20, 30, 40]), (1, (10,), [20, 30, 40]), (2, (), [20, 30, 40]), (9, (), [20, 30, 40])],
)
def test_what_is_not_kept_is_superseded(root: Path, keep: int, pinned: tuple[int, ...], gone: list[int]) -> None:
    """A damaged checkpoint does not count towards `keep`; nothing newer than an intact one is deleted."""
    found = superseded(root, keep, lambda saved: pinned)
    assert [entry.step for entry in found] == gone
    for entry in found:
        delete_checkpoint(entry.folder)
    assert superseded(root, keep, lambda saved: pinned) == []
    assert recover(root).checkpoint is not None


def test_an_import_is_kept_which_no_training_can_make_again(tmp_path: Path) -> None:
    """An import is known by the model in its metadata. A damaged one is not worth keeping."""
    save(tmp_path, 0, model={"family": "llama"})
    for step in range(10, 50, 10):
        save(tmp_path, step)
    assert [entry.step for entry in superseded(tmp_path, 1, nothing)] == [10, 20, 30]
    assert delete_older(tmp_path, 2) == (folder_of(tmp_path, 10), folder_of(tmp_path, 20))
    assert [entry.step for entry in listed(tmp_path)] == [0, 30, 40]
    flip(folder_of(tmp_path, 0) / MANIFEST, -1)
    assert delete_older(tmp_path, 2) == (folder_of(tmp_path, 0),)


def test_nothing_is_deleted_without_an_intact_checkpoint(root: Path) -> None:
    for step in (10, 50):
        flip(folder_of(root, step) / SHARD, -1)
    with pytest.raises(PentadError, match="is intact: expected one, or nothing is deleted"):
        superseded(root, 1, nothing)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert listed(tmp_path / "none") == [] == superseded(tmp_path, 1, nothing)
    shutil.copytree(save(tmp_path / "other", 5), tmp_path / "step-5")
    assert listed(tmp_path) == []


def test_what_saves_that_were_cut_short_have_left_in_a_checkpoint_is_deleted(tmp_path: Path) -> None:
    """A rank died while writing, and another mesh saved the step again. A save in progress has no manifest yet."""
    left = {".stage-0.safetensors.0123.partial", ".manifest.json.0123.partial", "stage-0-part-1.safetensors"}
    first, second, live = (folder_of(tmp_path, step) for step in (10, 20, 30))
    for folder in (first, second, live):
        folder.mkdir()
        for name in left | {"notes.txt"}:
            (folder / name).write_bytes(b"x")
    save(tmp_path, 10)
    save(tmp_path, 20)
    expected = {MANIFEST, "notes.txt", "stage-0.safetensors", "stage-1.safetensors"}
    assert delete_older(tmp_path, 2) == ()
    assert [{path.name for path in folder.iterdir()} for folder in (first, second)] == [expected, expected]
    assert {path.name for path in live.iterdir()} == left | {"notes.txt"}
    assert recover(tmp_path).checkpoint is not None


@pytest.mark.parametrize("delete", [delete_checkpoint, discard])
def test_a_folder_that_cannot_be_deleted_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, delete: Callable[[Path], None]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for method in ("delete", "delete_files"):
        monkeypatch.setattr(Local, method, refuse)
    folder = save(root, 80)
    (folder / MANIFEST).unlink()
    with pytest.raises(PentadError) as caught:
        delete(folder)
    assert str(caught.value) == (
        f"checkpoint {folder} cannot be deleted (Read-only file system): expected writable storage"
    )
    assert (80, "incomplete") in states(listed(root))


def test_what_a_save_has_left_is_discarded_unless_it_was_committed(root: Path) -> None:
    folder = save(root, 80)
    discard(folder)
    assert read_manifest(folder).step == 80
    (folder / MANIFEST).unlink()
    discard(folder)
    discard(folder)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["mine", "step-00000070"])
def test_nothing_but_a_checkpoint_s_folder_is_deleted(root: Path, name: str) -> None:
    """A link could lead to a checkpoint of another run."""
    with pytest.raises(PentadError, match="expected the step-00000000 folder of a checkpoint"):
        delete_checkpoint(root / name)
    assert (root / name).exists() and folder_of(root, 10).exists()
