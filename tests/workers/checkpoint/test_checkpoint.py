"""Checkpoints return what was written, bit for bit, and old ones are deleted safely."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import META, flip, save
from safetensors.torch import load_file

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import atomic_io
from pentad.workers.checkpoint.checkpoint import MANIFEST, commit, folder_of, newest, open_checked, open_checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.retention import delete_checkpoint, delete_older
from pentad.workers.checkpoint.shards import read, write_shard

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so NaN payloads, denormals and negative zeros too."""
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in root.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5)], ids=str)
def test_every_dtype_and_shape_is_read_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = any_bits(dtype, *shape)
    folder = folder_of(tmp_path, 1)
    shard = write_shard(folder, "a.safetensors", {"x": tensor, "flag": torch.tensor([True, False])})
    commit(folder, step=1, shards=[shard], meta={})
    found = read(open_checkpoint(folder), ["x", "flag"])
    assert found["x"].dtype == dtype
    assert found["x"].shape == tensor.shape
    assert torch.equal(bits(found["x"]), bits(tensor))
    assert found["flag"].tolist() == [True, False]


def test_a_strided_view_is_stored_contiguously(tmp_path: Path) -> None:
    base = torch.arange(24.0, requires_grad=True).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "part": base[1:3, ::2],
        "spread": torch.tensor(2.0).expand(5),
        "half": base.half(),
    }
    write_shard(tmp_path, "a.safetensors", tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "a.safetensors").items())


def test_safetensors_reads_a_shard_and_its_tensors_are_aligned(tmp_path: Path) -> None:
    tensors = {f"{dtype}": any_bits(dtype, 3, 5) for dtype in DTYPES}
    shard = write_shard(tmp_path, "a.safetensors", tensors)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys() == shard.tensors.keys()
    assert all(torch.equal(bits(loaded[name]), bits(tensors[name])) for name in tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert len(data) == shard.bytes
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        assert (start + entry["data_offsets"][0]) % tensors[name].element_size() == 0


def test_a_tensor_larger_than_a_write_chunk_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_io, "CHUNK", 1000)
    tensor = any_bits(torch.int64, 777)
    folder = folder_of(tmp_path, 1)
    commit(folder, step=1, shards=[write_shard(folder, "a.safetensors", {"x": tensor})], meta={})
    assert torch.equal(read(open_checkpoint(folder), ["x"])["x"], tensor)


def test_ranks_may_write_concurrently_into_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run" / "checkpoints", 1)
    with ThreadPoolExecutor(8) as pool:
        files = [f"stage-{rank}.safetensors" for rank in range(8)]
        shards = list(pool.map(lambda file: write_shard(folder, file, {file: torch.zeros(9)}), files))
    commit(folder, step=1, shards=shards, meta={})
    assert set(open_checkpoint(folder).tensors) == set(files)


def test_a_shard_converts_to_plain_data_and_back(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "a.safetensors", {"x": torch.zeros(2, 3, dtype=torch.bfloat16)})
    assert Shard.from_plain(json.loads(json.dumps(shard.plain()))) == shard
    assert shard.tensors == {"x": {"dtype": "BF16", "shape": [2, 3]}}


def test_meta_and_the_file_of_each_tensor_are_read_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 20))
    assert (checkpoint.step, checkpoint.meta) == (20, META | {"step": 20})
    assert checkpoint.tensors["model.layers.1.attention.qkv"][0].file == "stage-1.safetensors"
    assert len(checkpoint.tensors) == 4


def test_read_returns_the_named_tensors_in_their_own_memory(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    checkpoint = open_checkpoint(folder)
    names = ["optimizer.m.layers.1", "model.layers.0.attention.qkv"]
    found = read(checkpoint, names)
    assert list(found) == names
    for path in folder.glob("*.safetensors"):
        with open(path, "r+b") as file:  # the same inode: a memory map would see it
            file.write(bytes(path.stat().st_size))
    assert found["optimizer.m.layers.1"].unique().item() == 21
    found["optimizer.m.layers.1"] += 1
    with pytest.raises(PentadError, match=r"stage-1\.safetensors, bytes 0 to \d+: CRC-32 is "):
        read(open_checked(folder), names)


def test_a_missing_tensor_is_named_with_its_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    with pytest.raises(PentadError, match=rf"tensor model\.head is not in checkpoint {folder}"):
        read(open_checkpoint(folder), ["model.head"])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    shards = [write_shard(folder, f"{name}.safetensors", {"x": torch.zeros(2)}) for name in "ab"]
    with pytest.raises(PentadError, match=r"lists the tensor x in the files a\.safetensors and b\.safetensors"):
        commit(folder, step=1, shards=shards, meta={})
    with pytest.raises(PentadError, match=r"lists the file a\.safetensors twice"):
        commit(folder, step=1, shards=[shards[0], shards[0]], meta={})
    with pytest.raises(PentadError, match="at least one shard"):
        commit(folder, step=1, shards=[], meta={})
    assert newest(tmp_path).checkpoint is None


@pytest.mark.parametrize(
    "meta", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": torch.zeros(1)}, {"a": {1}}], ids=str
)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict[Any, Any]) -> None:
    folder = folder_of(tmp_path, 1)
    shard = write_shard(folder, "a.safetensors", {"x": torch.zeros(2)})
    with pytest.raises(PentadError, match="meta"):
        commit(folder, step=1, shards=[shard], meta=meta)


def test_commit_refuses_a_missing_shard_and_a_wrong_step(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    shard = write_shard(folder, "a.safetensors", {"x": torch.zeros(2)})
    with pytest.raises(PentadError, match="step is 2: expected 1"):
        commit(folder, step=2, shards=[shard], meta={})
    (folder / shard.file).unlink()
    with pytest.raises(PentadError, match=r"a\.safetensors cannot be read"):
        commit(folder, step=1, shards=[shard], meta={})


def test_committing_twice_changes_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    shard = write_shard(folder, "a.safetensors", {"x": torch.zeros(2)})
    first = commit(folder, step=1, shards=[shard], meta=META).read_bytes()
    assert commit(folder, step=1, shards=[shard], meta=META).read_bytes() == first


def test_a_committed_checkpoint_accepts_no_shard_until_it_is_deleted(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    with pytest.raises(PentadError, match="holds a committed checkpoint"):
        write_shard(folder, "stage-0.safetensors", {"x": torch.zeros(2)})
    open_checkpoint(folder)
    delete_checkpoint(folder)
    delete_checkpoint(folder)
    assert not folder.exists()
    save(tmp_path, 20)


@pytest.mark.parametrize("name", ["", "__metadata__", "a\nb", "\ud800"], ids=ascii)
def test_a_tensor_name_or_dtype_that_cannot_be_stored_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PentadError, match="name that safetensors cannot store"):
        write_shard(tmp_path, "a.safetensors", {name: torch.zeros(2)})
    with pytest.raises(PentadError, match=r"tensor x has dtype torch\.complex64: expected"):
        write_shard(tmp_path, "a.safetensors", {"x": torch.zeros(2, dtype=torch.complex64)})


def test_delete_older_keeps_the_newest_and_deletes_the_oldest_first(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert delete_older(tmp_path, keep=4) == ()
    assert delete_older(tmp_path, keep=2) == (folder_of(tmp_path, 10), folder_of(tmp_path, 20))
    assert steps(tmp_path) == [30, 40]
    assert delete_older(tmp_path, keep=1) == (folder_of(tmp_path, 30),)


def test_delete_older_keeps_pinned_ones_too(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert delete_older(tmp_path, keep=1, pinned=[20]) == (folder_of(tmp_path, 10), folder_of(tmp_path, 30))
    assert delete_older(tmp_path, keep=1, pinned=[40]) == (folder_of(tmp_path, 20),)


def test_delete_older_keeps_the_newest_valid_one_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip(folder_of(tmp_path, 30) / "stage-0.safetensors", -1)
    assert delete_older(tmp_path, keep=1) == (folder_of(tmp_path, 10),)
    assert newest(tmp_path).checkpoint == open_checkpoint(folder_of(tmp_path, 20))


def test_delete_older_deletes_nothing_when_nothing_is_valid(tmp_path: Path) -> None:
    for step in (10, 20):
        flip(save(tmp_path, step) / MANIFEST, 9)
    assert delete_older(tmp_path, keep=1) == ()
    assert steps(tmp_path) == [10, 20]


def test_delete_older_deletes_incomplete_folders_but_the_one_being_written(tmp_path: Path) -> None:
    for step in (5, 15, 25):
        write_shard(folder_of(tmp_path, step), "a.safetensors", {"x": torch.zeros(2)})
    assert delete_older(tmp_path, keep=3) == ()
    for step in (10, 20):
        save(tmp_path, step)
    assert delete_older(tmp_path, keep=3) == (folder_of(tmp_path, 5), folder_of(tmp_path, 15))
    assert steps(tmp_path) == [10, 20, 25]


def test_delete_older_touches_no_other_folder_and_follows_no_link(tmp_path: Path) -> None:
    root, other = tmp_path / "checkpoints", tmp_path / "other"
    save(other, 1)
    for step in (10, 20):
        save(root, step)
    folder_of(root, 1).symlink_to(folder_of(other, 1))
    for name in ("step-5", "step-000000005", "best", "step-0000000x"):
        (root / name).mkdir()
    (root / "step-00000002").touch()
    assert delete_older(root, keep=1) == (folder_of(root, 10),)
    assert len(list(root.iterdir())) == 7
    open_checkpoint(folder_of(other, 1))


@pytest.mark.parametrize("name", ["", "home", "step-5", "step-00000007"])
def test_only_checkpoints_are_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000007").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PentadError, match="folder is"):
        delete_checkpoint(tmp_path / name)
    with pytest.raises(PentadError, match=r"checkpoint\.keep is 0"):
        delete_older(tmp_path, keep=0)
