"""A storage failure costs no checkpoint; only proven damage does. One rule decides which checkpoints count."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip
from small_checkpoint import FILE, save_small

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import checkpoint, local_storage
from pentad.workers.checkpoint.checkpoint import MANIFEST, Unreadable, committed, folder_of, newest, recover
from pentad.workers.checkpoint.retention import delete_older

ERRORS = (errno.EIO, errno.ESTALE, errno.EMFILE)
FailReads = Callable[[str, int, int], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save_small(folder_of(tmp_path, step), step)
    return tmp_path


@pytest.fixture
def fail_reads(monkeypatch: pytest.MonkeyPatch) -> FailReads:
    """(file, errno, times): opening this file of step 20's checkpoint fails that many times."""
    monkeypatch.setattr(checkpoint, "RETRY_SECONDS", (0.0, 0.0, 0.0))

    def fail(name: str, number: int, times: int) -> None:
        left = [times]

        def failing(path: Any, *arguments: Any) -> io.BufferedReader:
            if Path(path) == Path(path).parent.with_name("step-00000020") / name and left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return open(path, *arguments)

        monkeypatch.setattr(local_storage, "open", failing, raising=False)

    return fail


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("file", [FILE, MANIFEST])
def test_an_error_that_passes_costs_nothing(root: Path, fail_reads: FailReads, file: str, number: int) -> None:
    fail_reads(file, number, 3)
    found = recover(root)
    assert found.checkpoint is not None and found.checkpoint.step == 20
    assert not found.refused and names(root) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("file", [FILE, MANIFEST])
def test_an_error_that_stays_is_one_sentence_and_renames_and_deletes_nothing(
    root: Path, fail_reads: FailReads, file: str
) -> None:
    save_small(folder_of(root, 5), 5)
    fail_reads(file, errno.EIO, 100)
    for read in (newest, recover, lambda root: delete_older(root, 1)):
        with pytest.raises(Unreadable, match=rf"step-00000020: {file} cannot be read \(Input/output error\): expected"):
            read(root)
    assert names(root) == ["step-00000005", "step-00000010", "step-00000020"]


def test_a_manifest_or_folder_that_cannot_be_looked_at_is_not_a_missing_one(
    root: Path, fail_reads: FailReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because of a stale NFS handle; otherwise a run would start over despite its checkpoints."""
    fail_reads("", 0, 0)

    def stale(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    scandir = os.scandir
    for folder in (root, folder_of(root, 20)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", lambda path, stale_one=folder: (stale if path == stale_one else scandir)(path))
            for read in (committed, newest):
                with pytest.raises(Unreadable, match="Stale file handle"):
                    read(root)


@pytest.mark.parametrize("damage", [MANIFEST, FILE])
def test_a_damaged_checkpoint_counts_nowhere_once_it_is_found(root: Path, damage: str) -> None:
    flip(folder_of(root, 20) / damage, 9)
    found = recover(root)
    assert found.checkpoint is not None and found.checkpoint.step == 10
    ((aside, reason),) = found.refused
    assert aside.name == "step-00000020.refused-1" and damage in reason
    assert list(committed(root)) == [10]
    save_small(folder_of(root, 20), 20)  # the step runs again
    flip(folder_of(root, 20) / damage, 9)
    assert recover(root).refused[0][0].name == "step-00000020.refused-2"


def test_a_checkpoint_with_a_damaged_manifest_or_a_missing_shard_does_not_count(root: Path) -> None:
    save_small(folder_of(root, 30), 30)
    flip(folder_of(root, 20) / MANIFEST, 9)
    (folder_of(root, 30) / FILE).unlink()
    assert list(committed(root)) == [10]


def test_a_run_never_begins_again_beside_damaged_checkpoints_unless_told_to(root: Path) -> None:
    for step in (10, 20):
        flip(folder_of(root, step) / FILE, -1)
    with pytest.raises(PentadError, match=r"no checkpoint in .* is intact \(.*restart_if_damaged = true"):
        recover(root)
    assert names(root) == ["step-00000010", "step-00000020"]
    found = recover(root, restart=True)
    assert found.checkpoint is None and len(found.refused) == 2
    assert names(root) == ["step-00000010.refused-1", "step-00000020.refused-1"]


def test_a_damaged_checkpoint_does_not_count_towards_keep(root: Path) -> None:
    for step in (30, 40):
        save_small(folder_of(root, step), step)
    assert delete_older(root, keep=3) == (folder_of(root, 10),)  # reads and verifies the others
    flip(folder_of(root, 30) / FILE, -1)
    save_small(folder_of(root, 50), 50)
    assert delete_older(root, keep=3) == (folder_of(root, 30),)
    assert list(committed(root)) == [20, 40, 50]
