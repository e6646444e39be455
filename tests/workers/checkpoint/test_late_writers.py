"""Unreachable ranks that write parts of a checkpoint, or commit one, after the run has rolled back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import commit, folder_of, open_checkpoint, read_manifest
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.retention import delete_older
from pentad.workers.checkpoint.shards import read, write_shards


def written(folder: Path, generation: int) -> list[Shard]:
    """The shards that the ranks of a generation write, filled with its number."""
    files = {f"stage-{stage}.safetensors": {f"w{stage}": torch.full((9,), generation)} for stage in range(2)}
    return [Shard.from_plain(entry) for entry in write_shards(folder, files, generation)]


def commit_as(folder: Path, generation: int, shards: list[Shard], run: str = "run") -> None:
    commit(folder, step=20, shards=shards, meta={"run": run, "generation": generation})


def generation_in(folder: Path) -> int:
    """The generation that committed the checkpoint; its tensors must be of that generation, too."""
    found = open_checkpoint(folder)
    assert read(found, ["w0"])["w0"].tolist() == [found.meta["generation"]] * 9
    return int(found.meta["generation"])


def test_a_checkpoint_of_an_earlier_generation_gives_way(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    commit_as(folder, 1, written(folder, 1))
    shards = written(folder, 3)
    assert generation_in(folder) == 1
    commit_as(folder, 3, shards)
    commit_as(folder, 3, shards)
    assert generation_in(folder) == 3


def test_an_earlier_generation_commits_nothing_over_a_later_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    late = written(folder, 1)
    commit_as(folder, 3, written(folder, 3))
    with pytest.raises(PentadError, match="another writer has committed it"):
        commit_as(folder, 1, late)
    assert generation_in(folder) == 3


def test_a_checkpoint_of_another_run_stays(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    commit_as(folder, 1, written(folder, 1), "another")
    with pytest.raises(PentadError, match="another writer has committed it"):
        commit_as(folder, 3, written(folder, 3))
    assert generation_in(folder) == 1


def test_files_that_are_written_late_are_in_no_checkpoint_and_are_deleted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    commit_as(folder, 3, written(folder, 3))
    late = written(folder, 1)
    assert generation_in(folder) == 3
    assert not {shard.file for shard in late} & {shard.file for shard in read_manifest(folder).shards}
    delete_older(tmp_path, 1)
    assert generation_in(folder) == 3 and not any((folder / shard.file).exists() for shard in late)
