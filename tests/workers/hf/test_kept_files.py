"""What an imported folder holds beside its weights returns from an export, unless training changed it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_files import take
from safetensors.torch import load_file

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import RopeScaling
from pentad.workers.checkpoint.checkpoint import open_checkpoint
from pentad.workers.hf.config import parse_config
from pentad.workers.hf.config_update import update_config
from pentad.workers.hf.exporter import ExportRequest, export_checkpoint
from pentad.workers.hf.kept_files import FOLDER, read_files

EXTRA = {
    "tokenizer_config.json": b'{"chat_template": "{{ messages }}",\n  "b": 1}',
    "chat_template.jinja": "{% for m in messages %}\u2581{% endfor %}".encode(),
    "special_tokens_map.json": b"{}",
    "LICENSE": b"do\r\nwhat you like",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
}
WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.gguf", ".gitattributes")


def config_of(name: str) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with keys that pentad does not know."""
    family, values = hf_models.MODELS[name]
    made = getattr(transformers, f"{family}Config")(
        **values, architectures=[f"{family}ForCausalLM"], eos_token_id=[7, 9], bos_token_id=3
    )
    return {**json.loads(made.to_json_string()), "auto_map": {"x": "y"}, "dtype": "bfloat16"}


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_a_config_that_training_did_not_change_returns_as_it_was_but_for_the_dtype(name: str) -> None:
    config = config_of(name)
    family, model = parse_config(config)
    updated = update_config(config, family, model, positions=16, dtype="float32")
    assert json.dumps(updated) == json.dumps({**config, "dtype": "float32"})


def test_old_spellings_stay_old() -> None:
    config = {key: value for key, value in config_of("llama-3.1").items() if key != "rope_parameters"}
    config |= {"rope_theta": 500.0, "rope_scaling": {**hf_models.LLAMA3, **hf_models.LONG}, "torch_dtype": "bfloat16"}
    family, model = parse_config(config)
    assert update_config(config, family, model, positions=1, dtype="bfloat16") == config
    longer = replace(model, rope_theta=900.0)
    assert update_config(config, family, longer, positions=1, dtype="bfloat16")["rope_theta"] == 900.0


def test_only_longer_sequences_change_the_positions_and_no_rope_with_them() -> None:
    config = config_of("llama-yarn")  # without the key, its scaling would take its original length from the positions
    del config["rope_parameters"]["original_max_position_embeddings"]
    family, model = parse_config(config)
    assert update_config(config, family, model, positions=64, dtype="float32")["max_position_embeddings"] == 64
    longer = update_config(config, family, model, positions=300, dtype="float32")
    assert longer["max_position_embeddings"] == 300
    assert parse_config(longer)[1] == model


def test_what_training_changed_is_written_in_the_spelling_of_the_import() -> None:
    config = config_of("deepseek-v3")
    config["num_experts"] = config.pop("n_routed_experts")
    family, model = parse_config(config)
    assert model.experts is not None
    changed = replace(
        model,
        rope_scaling=RopeScaling("yarn", 4.0, 64, 1.0, 32.0, 1.2),
        experts=replace(model.experts, routed_scaling_factor=1.25, num_experts=16),
    )
    updated = update_config(config, family, changed, positions=64, dtype="float32")
    differ = {key for key in updated if updated[key] != config.get(key)} - {"dtype"}
    assert differ == {"rope_parameters", "routed_scaling_factor", "num_experts", "max_position_embeddings"}
    assert updated["max_position_embeddings"] == 256 and parse_config(updated)[1] == changed


def test_weights_are_not_quantized_any_more() -> None:
    config = {**config_of("llama"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    updated = update_config(config, *parse_config(config), positions=64, dtype="float32")
    assert "quantization_config" not in updated


def test_another_family_than_the_imports_is_refused() -> None:
    with pytest.raises(PentadError, match=r"^model\.family is qwen3: expected llama, the family of the import$"):
        update_config(config_of("llama"), "qwen3", parse_config(config_of("llama"))[1], positions=1, dtype="float32")


def test_every_file_but_weights_goes_along_byte_for_byte(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(saved("deepseek-v3-halves"), tmp_path / "files"))
    for name, content in EXTRA.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    for name in WEIGHTS:
        (source / name).write_bytes(b"x")
    linked = tmp_path / "linked"  # as in the hub's cache
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    done = take(linked, tmp_path / "run")
    request = ExportRequest(done.family, done.model, 16, read_files(tmp_path / "run" / FOLDER))
    export_checkpoint(open_checkpoint(done.folder), tmp_path / "out", request, lambda done, total: None)
    before, after = read_files(source), read_files(tmp_path / "out")
    assert EXTRA.keys() | {"config.json", "generation_config.json"} == before.keys() == after.keys() == set(done.kept)
    for config in (before, after):
        config["config.json"] = json.loads(config["config.json"])
    assert before == after
    weights = [load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
