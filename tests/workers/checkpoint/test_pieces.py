"""Tensors that several ranks write in pieces are read as one, or the checkpoint is refused."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, commit, folder_of, open_checkpoint
from pentad.workers.checkpoint.manifest import piece_name
from pentad.workers.checkpoint.shards import read, read_elements, write_shard

SHAPES = [(7,), (5, 4), (3, 2, 2), (1,), ()]


def save_cut(root: Path, tensor: torch.Tensor, cuts: list[int]) -> Path:
    """A checkpoint of `tensor`, cut at these elements, with each piece in its own file."""
    folder, flat, shards = folder_of(root, 1), tensor.flatten(), []
    for number, (start, end) in enumerate(pairwise(cuts)):
        name = piece_name("x", tensor.shape, start, end)
        values = tensor if name == "x" else flat[start:end]
        shards.append(write_shard(folder, f"part{number}.safetensors", {name: values}))
    commit(folder, step=1, shards=shards, meta={})
    return folder


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_are_read_as_the_tensor(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = torch.Size(shape).numel()
    tensor = torch.randn(shape).to(dtype)
    cuts = sorted({0, size // 3, size // 2, size})
    found = open_checkpoint(save_cut(tmp_path, tensor, cuts))
    assert list(found.tensors) == ["x"]
    assert torch.equal(read(found, ["x"])["x"], tensor)
    for start in range(size + 1):
        for end in range(start, size + 1):
            elements = read_elements(found, "x", start, end)
            assert torch.equal(elements, tensor.flatten()[start:end]) and elements.dtype == dtype


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ({"x#4x2:0-3": 3}, "all 8 elements of tensor x"),
        ({"x#4x2:1-8": 7}, "element 0 of tensor x"),
        ({"x#4x2:0-5": 5, "x#4x2:4-8": 4}, "element 5 of tensor x"),
        ({"x#4x2:0-4": 4, "x#2x4:4-8": 4}, "element 4 of tensor x"),
        ({"x#4x2:0-4": 4, "x#4x2:4-9": 5}, "all 8 elements of tensor x"),
        ({"x#4x2:0-4": 4, "x#4x2:4-8": 3}, "the shape [4] of tensor x#4x2:4-8"),
        ({"x": 8, "x#8:0-4": 4}, "element 8 of tensor x"),
    ],
)
def test_pieces_that_do_not_make_a_tensor_are_refused(tmp_path: Path, pieces: dict[str, int], words: str) -> None:
    folder = folder_of(tmp_path, 1)
    shards = [
        write_shard(folder, f"part{number}.safetensors", {name: torch.zeros(size)})
        for number, (name, size) in enumerate(pieces.items())
    ]
    with pytest.raises(PentadError) as raised:
        commit(folder, step=1, shards=shards, meta={})
    assert words in str(raised.value)
    assert not (folder / MANIFEST).exists()


def test_a_checkpoint_of_the_format_before_is_read(tmp_path: Path) -> None:
    folder = save_cut(tmp_path, torch.arange(6.0), [0, 6])
    body = json.loads((folder / MANIFEST).read_bytes()) | {"version": 2}
    del body["checksum"]
    body["checksum"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / MANIFEST).write_bytes(canonical(body))
    assert torch.equal(read(open_checkpoint(folder), ["x"])["x"], torch.arange(6.0))


def canonical(body: dict) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
