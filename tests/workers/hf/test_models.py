"""Models imported from Hugging Face files give transformers' logits and export to the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hf_models
import pytest
import reference_families as reference
import torch
from hf_files import give, take, tensors_of
from hf_models import MODELS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pentad.schedules.spec.model import ModelSpec
from pentad.workers.hf.config import make_config, make_section, parse_config, parse_section
from pentad.workers.hf.names import FileLayout, tensor_table


class Case(NamedTuple):
    """A model of transformers, its files, and the checkpoint imported from them."""

    reference: Any
    files: Path
    family: str
    model: ModelSpec
    checkpoint: Path
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            torch.manual_seed(0)
            root = tmp_path_factory.mktemp(name)
            model = hf_models.make(name)
            files = hf_models.save(model, root / "files")
            done = take(files, root / "out")
            tensors = {key.removeprefix("model."): tensor for key, tensor in tensors_of(done).items()}
            made[name] = Case(model, files, done.family, done.model, done.folder, tensors)
        return made[name]

    return get


def batch(length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each [2, length]."""
    rows = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", hf_models.CASES)
def test_logits_are_those_of_transformers(case: Callable[[str], Case], name: str) -> None:
    it, (tokens, _) = case(name), batch()
    with torch.no_grad():
        assert relative_error(reference.forward(it.model, it.tensors, tokens), it.reference(tokens).logits) < 1e-5


@pytest.mark.parametrize("name", hf_models.CASES)
def test_logits_in_float64_are_those_of_transformers_in_float64(
    case: Callable[[str], Case], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, (tokens, _) = case(name), batch()
    wide = {key: tensor.double() for key, tensor in it.tensors.items()}
    with hf_models.widened(name, monkeypatch), torch.no_grad():
        model = hf_models.make(name).double()
        model.load_state_dict(it.reference.state_dict())
        expected = model(tokens).logits
    found = reference.forward(it.model, wide, tokens)
    assert found.dtype == expected.dtype == torch.float64
    assert relative_error(found, expected) < 1e-12


def test_mtp_layers_give_the_logits_of_transformers(case: Callable[[str], Case]) -> None:
    it, (tokens, targets) = case("deepseek-v3-mtp"), batch()
    mtp = hf_models.mtp_model(it.reference)
    with torch.no_grad():
        found = reference.predictions(it.model, it.tensors, tokens, targets)
        hidden = it.reference.model(tokens).last_hidden_state
        assert len(found) == it.model.mtp_layers == 2
        for number, logits in enumerate(found):
            count = tokens.shape[1] - 1 - number
            hidden = mtp.forward_layer(
                number,
                hidden[:, :count],
                torch.arange(number + 1, number + 1 + count)[None],
                None,
                input_ids=targets[:, number:-1],
            )
            assert relative_error(logits, it.reference.lm_head(hidden)) < 1e-5


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", hf_models.CASES)
def test_imported_and_exported_files_are_the_same(case: Callable[[str], Case], name: str, tmp_path: Path) -> None:
    it, (tokens, _) = case(name), batch()
    done = give(it.checkpoint, tmp_path / "out", it.family, it.model, limit=30_000)
    assert len(done.files) > 1
    weight_map = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    again = {key: tensor for file in done.files for key, tensor in load_file(tmp_path / "out" / file).items()}
    assert {key: file for file in done.files for key in load_file(tmp_path / "out" / file)} == weight_map
    if it.reference.config.model_type != "deepseek_v3" or it.reference.config.rope_interleave:
        before = load_file(it.files / "model.safetensors")
        assert before.keys() == again.keys()
        assert all(torch.equal(before[key], again[key]) for key in before)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    assert_same_state(model, it.reference)
    with torch.no_grad():
        found, expected = model(tokens).logits, it.reference(tokens).logits
    assert relative_error(found, expected) < 1e-6  # half-split rows: the same sum in another order
    if name != "deepseek-v3-halves":
        assert torch.equal(found, expected)


def assert_same_state(found: Any, expected: Any) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        reordered = found.config.to_dict().get("rope_interleave") != expected.config.to_dict().get("rope_interleave")
        if not (reordered and key.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight"))):
            assert mine[key].dtype == tensor.dtype and torch.equal(mine[key], tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_the_table_lists_every_tensor_of_the_files_once(case: Callable[[str], Case], name: str) -> None:
    it = case(name)
    names = tensor_table(it.family, it.model)
    parts = [part for entry in names.entries for part in entry.parts]
    assert len({part.name for part in parts}) == len(parts)
    assert len({entry.name for entry in names.entries}) == len(names.entries)
    files = load_file(it.files / "model.safetensors")
    copies = names.copies.keys() - ({"lm_head.weight"} if it.model.tie_word_embeddings else set())
    assert {part.name: part.shape for part in parts} == {
        key: tuple(tensor.shape) for key, tensor in files.items() if key not in copies
    }
    assert copies <= files.keys()
    for entry in names.entries:
        count = sum(torch.Size(part.shape).numel() for part in entry.parts)
        assert count == torch.Size(entry.shape).numel()


def test_names_and_shapes_in_a_checkpoint_never_change(case: Callable[[str], Case]) -> None:
    h, ffn, narrow, count, heads = 32, 48, 16, 8, 4
    expected: dict[str, tuple[int, ...]] = {"embedding": (64, h), "head": (64, h), "norm": (h,)}
    for layer in range(5):
        expected |= {
            f"layers.{layer}.{name}": sizes
            for name, sizes in {
                "attention_norm": (h,),
                "mlp_norm": (h,),
                "attention.query_down": (24, h),
                "attention.query_norm": (24,),
                "attention.query": (heads * 16, 24),
                "attention.latent": (16 + 8, h),
                "attention.latent_norm": (16,),
                "attention.keys_values": (heads * (8 + 12), 16),
                "attention.out": (h, heads * 12),
            }.items()
        }
    expected |= {"layers.0.mlp.gate_up": (2 * ffn, h), "layers.0.mlp.down": (h, ffn)}
    for layer in range(1, 5):
        expected |= {
            f"layers.{layer}.experts.router": (count, h),
            f"layers.{layer}.experts.bias": (count,),
            f"layers.{layer}.experts.gate_up": (count, 2 * narrow, h),
            f"layers.{layer}.experts.down": (count, h, narrow),
            f"layers.{layer}.shared.gate_up": (2 * narrow, h),
            f"layers.{layer}.shared.down": (h, narrow),
        }
    for number in range(2):
        norms = {f"mtp.{number}.{kind}": (h,) for kind in ("hidden_norm", "embedding_norm", "norm")}
        expected |= {**norms, f"mtp.{number}.join": (h, 2 * h)}
    found = case("deepseek-v3-mtp").tensors
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


@pytest.mark.parametrize("name", [name for name in MODELS if "mtp" not in name])
def test_the_fused_table_lists_what_transformers_holds_in_memory(case: Callable[[str], Case], name: str) -> None:
    it = case(name)
    names = tensor_table(it.family, it.model, FileLayout(fused_experts=True))
    held = {key: tuple(tensor.shape) for key, tensor in it.reference.state_dict().items() if key not in names.copies}
    assert {part.name: part.shape for entry in names.entries for part in entry.parts} == held


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_files_with_fused_experts_are_the_same_model(case: Callable[[str], Case], name: str, tmp_path: Path) -> None:
    it = case(name)
    it.reference.save_pretrained(tmp_path / "files", save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "files/model.safetensors"))
    done = take(tmp_path / "files", tmp_path / "out")
    assert done.model == it.model
    for key, tensor in tensors_of(done).items():
        assert torch.equal(tensor, it.tensors[key.removeprefix("model.")]), key


@pytest.mark.parametrize("name", MODELS)
def test_a_model_returns_from_its_config_and_from_its_section(case: Callable[[str], Case], name: str) -> None:
    it = case(name)
    config = json.loads(json.dumps(make_config(it.family, it.model, positions=64)))
    family, again = parse_config(config)
    assert family == it.family
    assert_close(make_section(family, again), make_section(family, it.model))
    section = json.loads(json.dumps(make_section(it.family, it.model)))
    assert parse_section(section) == (it.family, it.model)


def assert_close(found: Any, expected: Any) -> None:
    """Equal except for the last digits of YaRN's factors, which config.json stores in another form."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    else:
        assert found == (pytest.approx(expected, rel=1e-11) if isinstance(expected, float) else expected)
