"""Models in checkpoints of torch.distributed.checkpoint are imported, and exported again, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from dcp_files import load, save
from hf_files import take, target, tensors_of
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint.checkpoint import commit, folder_of, open_checkpoint
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.dcp.exporter import export_dcp
from pentad.workers.dcp.importer import import_dcp
from pentad.workers.hf.config import parse_config
from pentad.workers.hf.exporter import ExportRequest, export_checkpoint
from pentad.workers.hf.importer import Imported
from pentad.workers.hf.kept_files import read_files

slow = pytest.mark.slow
QUICK = ("llama-tied", "mixtral", "deepseek-v3-halves")
NAMES = [name if name in QUICK else pytest.param(name, marks=slow) for name in hf_models.MODELS if "mtp" not in name]
Saved = Callable[[str], Path]


def model_of(files: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(files)


def described(files: Path) -> tuple[str, ModelSpec, dict[str, bytes]]:
    kept = read_files(files)
    return *parse_config(json.loads(kept["config.json"])), kept


def give(done: Imported, out: Path, *, titan: bool = False, dtype: Any = None, **more: Any) -> Path:
    request = ExportRequest(done.family, done.model, 64, read_files(done.folder.parent.parent / "hf"), **more)
    export_dcp(open_checkpoint(done.folder), out, request, lambda done, total: None, titan=titan, dtype=dtype)
    return out


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_of_transformers_is_the_same_model(name: str, nested: bool, saved: Saved, tmp_path: Path) -> None:
    """As torch holds it in memory, with experts in one tensor; alone or among other values."""
    state = model_of(saved(name)).state_dict()
    whole = {"app": {"model": state, "step": torch.tensor(4), "text": "x"}} if nested else state
    done = import_dcp(save(whole, tmp_path / "dcp"), *described(saved(name)), target(tmp_path / "out"))
    by_files = take(saved(name), tmp_path / "files")
    assert (done.family, done.model, done.step) == (by_files.family, by_files.model, 0)
    assert_same(tensors_of(done), tensors_of(by_files))


@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_an_export_into_the_model_of_transformers(name: str, saved: Saved, tmp_path: Path) -> None:
    model = model_of(saved(name))
    out = give(take(saved(name), tmp_path / "out"), tmp_path / "dcp")
    blank = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
    assert_same(load(blank, out), model.state_dict())
    assert json.loads((out / "config.json").read_text())["architectures"] == model.config.architectures


def test_torch_loads_an_export_of_hugging_face_files(saved: Saved, tmp_path: Path) -> None:
    done = take(saved("llama"), tmp_path / "in")
    export_checkpoint(
        open_checkpoint(done.folder),
        tmp_path / "out",
        ExportRequest(done.family, done.model, 64),
        lambda done, total: None,
    )
    state = model_of(saved("llama")).state_dict()
    blank = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load(blank, tmp_path / "out", storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")))
    assert_same(blank, state)


def test_float64_stays_float64_in_and_out(saved: Saved, tmp_path: Path) -> None:
    state = {key: tensor.double() / 3 for key, tensor in model_of(saved("deepseek-v3")).state_dict().items()}
    done = import_dcp(save(state, tmp_path / "dcp"), *described(saved("deepseek-v3")), target(tmp_path / "in"))
    assert {tensor.dtype for tensor in tensors_of(done).values()} == {torch.float64}
    out = give(done, tmp_path / "out")
    blank = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    assert_same(load(blank, out), state)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float64"


def test_bfloat16_on_request(saved: Saved, tmp_path: Path) -> None:
    state = model_of(saved("llama")).state_dict()
    out = give(take(saved("llama"), tmp_path / "in"), tmp_path / "out", dtype="bfloat16")
    narrow = {key: tensor.bfloat16() for key, tensor in state.items()}
    assert_same(load({key: torch.zeros_like(tensor) for key, tensor in narrow.items()}, out), narrow)


def titan_state(files: Path, *, old: bool) -> dict[str, torch.Tensor]:
    """The model of these files as torchtitan names and orders it."""
    model = model_of(files)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    names = {"embed_tokens": "tok_embeddings", "lm_head": "output" if old else "lm_head", "mlp": "feed_forward"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn": "attention"}
    linear = "" if old else "qkv_linear."
    names |= {f"{kind}_proj": f"{linear}w{kind}" for kind in "qkv"} | {"o_proj": "wo"}
    names |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    state = {}
    for key, tensor in model.state_dict().items():
        words = key.removeprefix("model.").split(".")
        count = next((heads[word] for word in words if word in heads), 0)
        if count and model.config.model_type == "llama":  # rotary pairs become neighbours
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        state[".".join(names.get(word, word) for word in words)] = tensor
    return state


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("name", ["llama", pytest.param("llama-tied", marks=slow), "llama-3.1", "qwen3"])
def test_a_checkpoint_of_torchtitan_is_the_same_model(name: str, old: bool, saved: Saved, tmp_path: Path) -> None:
    state = titan_state(saved(name), old=old)
    rest = {"freqs_cis": torch.ones(3, dtype=torch.complex64), "train_state": {"step": torch.tensor(9)}, "lr": {"x": 1}}
    done = import_dcp(save(state | rest, tmp_path / "dcp"), *described(saved(name)), target(tmp_path / "out"))
    assert_same(tensors_of(done), tensors_of(take(saved(name), tmp_path / "files")))
    if not old:
        out = give(done, tmp_path / "again", titan=True)
        assert_same(load({key: torch.zeros_like(tensor) for key, tensor in state.items()}, out), state)


def test_torchtitans_names_are_refused_for_experts(saved: Saved, tmp_path: Path) -> None:
    done = take(saved("mixtral"), tmp_path / "in")
    with pytest.raises(PentadError, match=r"^model\.family is mixtral: expected llama or qwen3"):
        give(done, tmp_path / "out", titan=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", [pytest.param("llama-tied", marks=slow), "deepseek-v3", pytest.param("mixtral", marks=slow)]
)
def test_the_moments_of_torchs_adam_come_in_and_go_out(name: str, saved: Saved, tmp_path: Path) -> None:
    """They are cut and reordered like weights: the expected ones are imported as if they were weights."""
    model = model_of(saved(name))
    weights = model.state_dict()
    trained = dict(model.named_parameters())
    state, expected = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for kind, theirs in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        moment = {key: torch.randn_like(tensor) for key, tensor in trained.items()}
        state |= {f"{key}.{theirs}": tensor for key, tensor in moment.items()}
        copies = {key: moment.get(key, moment["model.embed_tokens.weight"]) for key in weights if "bias" not in key}
        save(weights | copies, tmp_path / kind)
        done = import_dcp(tmp_path / kind, *described(saved(name)), target(tmp_path / f"{kind}-in"))
        found = {key.removeprefix("model."): tensor for key, tensor in tensors_of(done).items() if "bias" not in key}
        expected |= {f"optimizer.{kind}.{key}": tensor for key, tensor in found.items()}
    flat = {f"optimizer.state.{key}": tensor for key, tensor in state.items()}
    flat |= {f"optimizer.state.{key}.step": torch.tensor(12.0) for key in trained}
    source = save({"model": weights, **flat, "optimizer.param_groups.x.lr": 1e-3}, tmp_path / "dcp")
    done = import_dcp(source, *described(saved(name)), target(tmp_path / "in"), optimizer=True)
    assert done.step == 12 and done.folder.name == "step-00000012"
    found = tensors_of(done)
    assert_same({key: found[key] for key in found if key.startswith("optimizer.")}, expected)
    out = give(done, tmp_path / "out", optimizer=True)
    assert_same(load({key: torch.zeros_like(tensor) for key, tensor in flat.items()}, out), flat)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight is not in"),
        ({"model.norm.weight": torch.ones(31)}, r"has shape \[31\]: expected \[32\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int64)}, "has dtype torch.int64: expected float64 or"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias is in .*: expected only those"),
        ({"model.embed_tokens.weight": None}, "has no tensor of an embedding"),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], words: str, saved: Saved, tmp_path: Path) -> None:
    state = {key: tensor for key, tensor in model_of(saved("llama")).state_dict().items() if key not in change}
    state |= {key: tensor for key, tensor in change.items() if tensor is not None}
    with pytest.raises(PentadError, match=words):
        import_dcp(save(state, tmp_path / "dcp"), *described(saved("llama")), target(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_missing_optimizer_is_refused(saved: Saved, tmp_path: Path) -> None:
    state = model_of(saved("llama")).state_dict()
    with pytest.raises(PentadError, match="has no optimizer state: expected moments of Adam"):
        import_dcp(save(state, tmp_path / "dcp"), *described(saved("llama")), target(tmp_path / "out"), optimizer=True)
    done = take(saved("llama"), tmp_path / "in")
    with pytest.raises(PentadError, match="has nothing of the optimizer: expected m and v"):
        give(done, tmp_path / "again", optimizer=True)
    other = replace(done.model, layers=1)
    folder = folder_of(tmp_path, 3)
    tensors = {"model.norm": torch.ones(32), "optimizer.momentum.norm": torch.ones(32)}
    commit(folder, step=3, shards=[write_shard(folder, "a.safetensors", tensors)], meta={})
    with pytest.raises(PentadError, match="has momentum of the optimizer: expected m and v"):
        give(done._replace(folder=folder, model=other), tmp_path / "again", optimizer=True)
