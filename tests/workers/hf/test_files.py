"""Missing, wrong and unreadable files are refused in one sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_files import INDEX, SINGLE, change, give, refused, take, tensors_of
from safetensors.torch import load_file, save_file

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import atomic_io
from pentad.workers.checkpoint.checksums import Written
from pentad.workers.checkpoint.local_storage import LOCAL
from pentad.workers.hf.folder import TensorFiles

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def files(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """The files of a Llama, free to change."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "files"))


def split(files: Path, parts: int) -> None:
    """Distributes the tensors over several files with an index."""
    state = load_file(files / SINGLE)
    (files / SINGLE).unlink()
    weight_map = {name: f"model-{number % parts}.safetensors" for number, name in enumerate(state)}
    for file in set(weight_map.values()):
        save_file({name: state[name] for name in state if weight_map[name] == file}, files / file)
    (files / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_several_files_give_the_same_checkpoint_as_one(
    saved: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    split(files, 3)
    one, several = take(saved("llama"), tmp_path / "one"), take(files, tmp_path / "several", limit=10_000)
    assert len(list(several.folder.glob("*.safetensors"))) > 3
    mine, theirs = tensors_of(several), tensors_of(one)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_missing_tensor_is_named(files: Path, tmp_path: Path) -> None:
    change(files, model__layers__1__mlp__down_proj__weight=None)
    refused(files, tmp_path, DOWN, "[32, 48]")


def test_a_wrong_shape_is_named_with_the_expected_one(files: Path, tmp_path: Path) -> None:
    change(files, model__layers__1__mlp__down_proj__weight=torch.zeros(32, 47))
    refused(files, tmp_path, DOWN, "[32, 47]", "[32, 48]")


def test_a_dtype_that_float32_cannot_represent_is_named(files: Path, tmp_path: Path) -> None:
    change(files, model__norm__weight=torch.ones(32, dtype=torch.float64))
    refused(files, tmp_path, "model.norm.weight", "F64", "BF16")


def test_a_tensor_that_the_config_does_not_imply_is_named(files: Path, tmp_path: Path) -> None:
    change(files, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    refused(files, tmp_path, "q_proj.bias")
    change(files, model__layers__0__self_attn__q_proj__bias=None)
    change(files, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert take(files, tmp_path / "out").tensors == 15


def test_a_tied_head_may_be_in_the_files_if_it_is_the_embedding(files: Path, tmp_path: Path) -> None:
    hf_models.rewrite(files, tie_word_embeddings=True)
    refused(files, tmp_path, "lm_head.weight", "copy")
    change(files, lm_head__weight=load_file(files / SINGLE)["model.embed_tokens.weight"].clone())
    assert take(files, tmp_path / "out").model.tie_word_embeddings


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, ["config.json", "cannot be read"]),
        ("config.json", b"{", ["config.json", "not JSON"]),
        ("config.json", b"[]", ["config.json", "not an object"]),
        (SINGLE, None, [SINGLE, "missing"]),
        (SINGLE, b"\x08", [SINGLE, "cannot be read"]),
        (INDEX, b"{}", [INDEX, "weight_map"]),
        (INDEX, b'{"weight_map": {"a": "../b.safetensors"}}', [INDEX, "../b.safetensors"]),
        (INDEX, b'{"weight_map": {"model.norm.weight": "lost.safetensors"}}', ["model.layers.0.input_layernorm"]),
    ],
)
def test_a_missing_or_broken_file_is_named(
    files: Path, tmp_path: Path, file: str, content: bytes | None, words: list[str]
) -> None:
    if content is None:
        (files / file).unlink()
    else:
        (files / file).write_bytes(content)
    refused(files, tmp_path, *words)


def test_a_truncated_file_is_named(files: Path, tmp_path: Path) -> None:
    content = (files / SINGLE).read_bytes()
    (files / SINGLE).write_bytes(content[: len(content) // 2])
    refused(files, tmp_path, SINGLE, "cannot be read")


def test_files_that_differ_from_the_index_are_named(files: Path, tmp_path: Path) -> None:
    split(files, 2)
    state = load_file(files / "model-1.safetensors")
    lost = next(iter(state))
    save_file({name: tensor for name, tensor in state.items() if name != lost}, files / "model-1.safetensors")
    refused(files, tmp_path, "model-1.safetensors", lost)
    (files / "model-1.safetensors").unlink()
    refused(files, tmp_path, "model-1.safetensors", "missing")


def test_a_name_that_no_file_can_have_is_that_of_a_missing_one(files: Path, tmp_path: Path) -> None:
    with TensorFiles(files) as found:
        index = {"weight_map": dict.fromkeys(found.files, "x" * 5000)}
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(files, tmp_path, "xxx is missing")


def test_a_missing_source_and_an_output_folder_with_content_are_refused(files: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path, "nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    with pytest.raises(PentadError, match="exists and is not empty"):
        take(files, tmp_path / "full")
    assert (tmp_path / "full" / "mine").read_text() == "kept"


@pytest.mark.parametrize("existed", [True, False])
def test_a_storage_failure_midway_leaves_nothing(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    done = take(files, tmp_path / "complete")
    written = 0

    def write_file(path: Path, parts: Any, publishing: Any) -> Written:
        nonlocal written
        written += 1
        if written > 2:
            raise OSError(28, os.strerror(28))
        return atomic_io.write_file(path, parts, publishing)

    out = tmp_path / "a" / "b"
    if existed:
        out.mkdir(parents=True)
    monkeypatch.setattr(LOCAL, "write", write_file)
    with pytest.raises(PentadError, match="No space left"):
        take(files, out, limit=10_000)
    assert out.exists() == existed and not (existed and any(out.iterdir()))
    written = 0
    with pytest.raises(PentadError, match="No space left"):
        give(done.folder, out, done.family, done.model, limit=10_000)
    assert out.exists() == existed and not (existed and any(out.iterdir()))
