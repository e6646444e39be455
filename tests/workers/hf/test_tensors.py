"""Import and export hold at most two tensors in memory and change none."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_files import SINGLE, change, give, refused, take, tensors_of, with_tensors
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import commit, folder_of, open_checkpoint
from pentad.workers.checkpoint.shards import read, write_shard
from pentad.workers.hf.layout import packed_shapes
from pentad.workers.params.sharded_state import read_full


class Live(TorchDispatchMode):
    """Records the peak bytes that float32 results of torch operations occupy."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.made = [*(each for each in self.made if each() is not None), weakref.ref(out)]
            storages = [tensor.untyped_storage() for each in self.made if (tensor := each()) is not None]
            self.peak = max(self.peak, sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
        return out


def test_import_and_export_hold_at_most_two_tensors(saved, tmp_path: Path) -> None:
    stored = {name: tensor.bfloat16() for name, tensor in load_file(saved("deepseek-v3") / SINGLE).items()}
    source = with_tensors(saved("deepseek-v3"), stored, tmp_path / "half")
    with Live() as live:
        done = take(source, tmp_path / "out")
    largest = 4 * max(tensor.numel() for tensor in stored.values())
    assert largest <= live.peak <= 2 * largest < done.bytes / 10
    found = open_checkpoint(done.folder)
    largest = 4 * max(tensor.numel() for tensor in read(found, found.tensors).values())
    with Live() as live:
        give(done.folder, tmp_path / "again", done.family, done.model, dtype="bfloat16")
    assert 0 < live.peak <= 2 * largest < done.bytes / 2
    again = load_file(tmp_path / "again" / SINGLE)
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(again[name], tensor.float() if "correction" in name else tensor), name


def test_fp8_blocks_are_read_with_their_scales(saved, tmp_path: Path) -> None:
    plain = load_file(saved("deepseek-v3-mtp") / SINGLE)
    stored, expected = dict(plain), dict(plain)
    for name, tensor in plain.items():
        if "_proj" in name and "eh_proj" not in name:
            blocks = tuple(-(-size // 12) for size in tensor.shape)
            scales = torch.rand(blocks) + 0.5
            stored[name], stored[f"{name}_scale_inv"] = (tensor * 20).to(torch.float8_e4m3fn), scales
            expanded = scales.repeat_interleave(12, 0).repeat_interleave(12, 1)[: tensor.shape[0], : tensor.shape[1]]
            expected[name] = stored[name].float() * expanded
    with_tensors(saved("deepseek-v3-mtp"), expected, tmp_path / "wide")
    source = with_tensors(saved("deepseek-v3-mtp"), stored, tmp_path / "eight")
    refused(source, tmp_path, "F8_E4M3")
    hf_models.rewrite(source, quantization_config={"quant_method": "gptq"})
    refused(source, tmp_path, "quantization_config", "gptq")
    hf_models.rewrite(source, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [12, 12]})
    mine, theirs = (tensors_of(take(tmp_path / name, tmp_path / f"{name}-out")) for name in ("eight", "wide"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    change(source, model__layers__0__mlp__down_proj__weight_scale_inv=torch.ones(1, 1))
    refused(source, tmp_path, "down_proj.weight_scale_inv", "[1, 1]")


def test_mxfp4_experts_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    """All bytes, and exponents from the smallest whose values are all exact in float32 to large ones."""
    files = hf_models.save(hf_models.make("gpt-oss", intermediate_size=64), tmp_path / "files")
    generator = torch.Generator().manual_seed(0)
    stored, expected = load_file(files / SINGLE), load_file(files / SINGLE)
    for name in [each for each in stored if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        values = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(3, 240, values.shape[:-1], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": values, f"{name}_scales": exponents}
        expected[name] = convert_moe_packed_tensors(values, exponents, dtype=torch.float32)
    with_tensors(files, expected, tmp_path / "wide")
    source = with_tensors(files, stored, tmp_path / "packed")
    refused(source, tmp_path, "experts.gate_up_proj is not in")
    hf_models.rewrite(source, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    mine, theirs = (tensors_of(take(tmp_path / name, tmp_path / f"{name}-out")) for name in ("packed", "wide"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    down = "model__layers__0__mlp__experts__down_proj"
    change(source, **{f"{down}_scales": torch.ones(1, 1, dtype=torch.uint8)})
    refused(source, tmp_path, "down_proj_scales", "[1, 1]")
    change(source, **{f"{down}_scales": None})
    refused(source, tmp_path, "down_proj_scales is not in")
    hf_models.rewrite(source, intermediate_size=48)
    refused(source, tmp_path)


@pytest.mark.parametrize("inputs", [16, 48])
def test_mxfp4_has_no_partial_blocks(inputs: int) -> None:
    with pytest.raises(PentadError, match=f"{inputs} inputs: expected a multiple of 32"):
        packed_shapes((4, inputs, 8))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "mixtral"])
def test_what_is_written_in_8_bits_is_read_back(saved, tmp_path: Path, name: str) -> None:
    """Each projection to half a step of its block's scale, all else as in bfloat16; transformers reads the same."""
    done = take(saved(name), tmp_path / "checkpoint")
    give(done.folder, tmp_path / "wide", done.family, done.model, dtype="bfloat16")
    give(done.folder, tmp_path / "eight", done.family, done.model, dtype="fp8")
    wide, eight = (load_file(tmp_path / each / SINGLE) for each in ("wide", "eight"))
    config = json.loads((tmp_path / "eight" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    scaled = {each.removesuffix("_scale_inv") for each in eight if each.endswith("_scale_inv")}
    projections = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    assert scaled == {each for each in wide if each.endswith(projections)}
    for each, tensor in wide.items():
        assert eight[each].dtype == (torch.float8_e4m3fn if each in scaled else tensor.dtype), each
        if each not in scaled:
            assert torch.equal(eight[each], tensor), each
    again = tensors_of(take(tmp_path / "eight", tmp_path / "again"))
    for each, tensor in tensors_of(done).items():
        error = (again[each] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-9)
        assert error < 1 / 16, each
    on_cpu = {"dtype": torch.float32, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "eight", **on_cpu).state_dict()
    for each, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32).state_dict().items()
    ):
        assert (theirs[each] - tensor).abs().max() <= tensor.abs().max() / 16, each


def test_experts_with_biases_are_not_written_in_8_bits(saved, tmp_path: Path) -> None:
    done = take(saved("gpt-oss"), tmp_path / "checkpoint")
    with pytest.raises(PentadError, match=r"fp8 for experts with biases, .*: expected bfloat16 or float32"):
        give(done.folder, tmp_path / "eight", done.family, done.model, dtype="fp8")
    assert not (tmp_path / "eight").exists()


def test_mtp_layers_that_transformers_did_not_save_are_left_out(saved, tmp_path: Path) -> None:
    kept = load_file(saved("deepseek-v3-mtp") / SINGLE)
    main = {name: kept[name] for name in kept if not name.startswith(("model.layers.3", "model.layers.4"))}
    source = with_tensors(saved("deepseek-v3-mtp"), main, tmp_path / "files")
    assert take(source, tmp_path / "out").model.mtp_layers == 0
    save_file({name: kept[name] for name in kept if not name.startswith("model.layers.4.eh_proj")}, source / SINGLE)
    refused(source, tmp_path, "model.layers.4.eh_proj.weight")


def test_expert_biases_that_training_does_not_move_return_from_an_export(saved, tmp_path: Path) -> None:
    done = take(saved("deepseek-v3"), tmp_path / "in")
    assert done.model.experts is not None
    frozen = replace(done.model, experts=replace(done.model.experts, bias_update_rate=0.0))
    give(done.folder, tmp_path / "out", done.family, frozen)
    before, after = (load_file(folder / SINGLE) for folder in (saved("deepseek-v3"), tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert all(after[name].any() for name in after if "correction" in name)


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path: Path) -> None:
    done = take(saved("llama"), tmp_path / "in")
    deeper, narrower = replace(done.model, layers=3), replace(done.model, ffn=47)
    for model, words in ((deeper, r"layers\.2"), (narrower, r"\[96, 32\]: expected \[94, 32\]")):
        with pytest.raises(PentadError, match=words):
            give(done.folder, tmp_path / "out", done.family, model)
        assert not (tmp_path / "out").exists()


def test_optimizer_moments_of_an_import_are_zero(saved, tmp_path: Path) -> None:
    found = open_checkpoint(take(saved("llama"), tmp_path / "in").folder)
    assert torch.equal(read_full(found, "optimizer.m.norm", (32,)), torch.zeros(32))
    assert torch.equal(read_full(found, "model.norm", (32,)), load_file(saved("llama") / SINGLE)["model.norm.weight"])
    with pytest.raises(PentadError, match=r"model\.nothing"):
        read_full(found, "model.nothing", (32,))
    folder = folder_of(tmp_path / "run", 1)
    moments = {"model.norm": torch.ones(32), "optimizer.m.head": torch.ones(3)}
    commit(folder, step=1, shards=[write_shard(folder, "a.safetensors", moments)], meta={})
    with pytest.raises(PentadError, match=r"optimizer\.m\.norm"):
        read_full(open_checkpoint(folder), "optimizer.m.norm", (32,))
