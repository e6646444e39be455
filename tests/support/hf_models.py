"""Tiny models of every family in transformers, with random weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "beta_fast": 8, "beta_slow": 1}
LONG = {"original_max_position_embeddings": 32}
DEEP = {
    **SIZES,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
DENSE = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 48, "num_key_value_heads": 2}
QWEN_MOE = {**DENSE, "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}

# A hidden size whose square root is exact in every dtype.
GEMMA = {**DENSE, "hidden_size": 64, "head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

GPT_OSS = {
    **{**DENSE, "hidden_size": 64, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "rope_parameters": {**YARN, **LONG, "truncate": False}},
}

# Name of a model -> (class prefix in transformers, values in its config).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DENSE),
    "llama-tied": ("Llama", {**DENSE, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-3.1": ("Llama", {**DENSE, "rope_parameters": {**LLAMA3, **LONG}, "head_dim": 16}),
    "llama-yarn": ("Llama", {**DENSE, "rope_parameters": {**YARN, **LONG}}),
    "qwen2": ("Qwen2", {**DENSE, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {**DENSE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "mistral": ("Mistral", {**DENSE, "head_dim": 16, "sliding_window": 5}),
    "mistral-full": ("Mistral", {**DENSE, "sliding_window": None}),
    "olmo2": ("Olmo2", DENSE),
    "gemma2": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {**GEMMA, "query_pre_attn_scalar": 8, "rope_parameters": GEMMA_3_ROPE}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "phi3": ("Phi3", {**DENSE, "sliding_window": 6, "pad_token_id": 0}),
    "qwen3": ("Qwen3", {**DENSE, "head_dim": 12, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-dense": ("Qwen3Moe", {**QWEN_MOE, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "deepseek-v3": ("DeepseekV3", DEEP),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**DEEP, "q_lora_rank": None, "rope_parameters": {**YARN, **LONG, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek-v3-halves": ("DeepseekV3", {**DEEP, "rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "deepseek-v3-raw": (
        "DeepseekV3",
        {
            **DEEP,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek-v3-mtp": ("DeepseekV3", {**DEEP, "num_mtp_layers": 2}),
}


# Run only as slow cases: each differs little from one of the models that expensive tests always run.
SLOW = {"qwen2", "qwen2-window", "mistral", "mistral-full", "phi3", "gemma2-uncapped", "gemma3"}
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the name is not that of the model class


def make(name: str, **other: Any) -> Any:
    """A model with random weights, norms and biases included, whose logits are of order 1."""
    family, values = MODELS[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**{**values, **other})
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return randomized(model)


def randomized(model: Any) -> Any:
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            bias = key.endswith("e_score_correction_bias")
            tensor.copy_(
                0.1 * torch.randn_like(tensor) if bias or tensor.dim() > 1 else 1 + 0.2 * torch.randn_like(tensor)
            )
    return model.eval()


def save(model: Any, folder: Path, **how: Any) -> Path:
    """Saves a model including its MTP layers, which transformers omits."""
    model.save_pretrained(folder, **how)
    extra = mtp_tensors(model)
    if extra:
        path = folder / "model.safetensors"
        save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    return folder


def mtp_model(model: Any) -> Any:
    """The model's MTP layers with fixed random weights; None if it has none."""
    count = getattr(model.config, "num_mtp_layers", 0)
    if not count:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(7)
        main = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        made = randomized(MtpModel(model, count))
        model.load_state_dict(main)  # MTP layers share embedding and head with the model
    return made


def mtp_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The MTP layers' tensors under the names in DeepSeek-V3's files."""
    made, found = mtp_model(model), {}
    if made is None:
        return {}
    for key, tensor in made.state_dict().items():
        if not key.startswith("layers."):
            continue
        _, number, rest = key.split(".", 2)
        at = f"model.layers.{model.config.num_hidden_layers + int(number)}"
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if rest.endswith("experts.gate_up_proj"):
            for expert, pair in enumerate(tensor):
                for kind, half in zip(("gate", "up"), pair.chunk(2), strict=True):
                    found[f"{at}.mlp.experts.{expert}.{kind}_proj.weight"] = half.clone()
        elif rest.endswith("experts.down_proj"):
            found |= {f"{at}.mlp.experts.{e}.down_proj.weight": one.clone() for e, one in enumerate(tensor)}
        else:
            found[f"{at}.{rest}"] = tensor.clone()
        found[f"{at}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        found[f"{at}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    return found


def rewrite(folder: Path, **values: Any) -> None:
    """Changes keys of config.json; None removes them."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@contextmanager
def widened(name: str, monkeypatch: Any) -> Iterator[None]:
    """Within the block, a family computes in float64 what it normally casts to float32: norms, softmax, router,
    angles."""
    module = (
        MODELS[name][0]
        .lower()
        .replace("qwen3moe", "qwen3_moe")
        .replace("deepseekv3", "deepseek_v3")
        .replace("gptoss", "gpt_oss")
    )
    modules = [importlib.import_module(f"transformers.models.{module}.modeling_{module}")]
    modules.append(importlib.import_module("transformers.modeling_rope_utils"))
    with monkeypatch.context() as patch:
        for each in modules:
            patch.setattr(each, "torch", _Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


class _Wide:
    """The torch module with float64 in place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
