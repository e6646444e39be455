"""Model sections of published sizes, as in their config.json, but with the rotary embedding of pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Section = Mapping[str, Any]
_NONE: Section = MappingProxyType({})


Sizes = tuple[int, ...]  # layers, hidden, heads, kv_heads, ffn


def _model(family: str, sizes: Sizes, vocab: int, rope_theta: float, norm_eps: float, **others: Any) -> Section:
    keys = dict(zip(("layers", "hidden", "heads", "kv_heads", "ffn"), sizes, strict=True))
    return {"family": family, **keys, "vocab": vocab, "rope_theta": rope_theta, "norm_eps": norm_eps, **others}


def _llama(*sizes: int, tied: bool = False) -> Section:
    return _model("llama", sizes, 128256, 5e5, 1e-5, **_tied(tied))


def _qwen3(*sizes: int, family: str = "qwen3", tied: bool = False, **others: Any) -> Section:
    return _model(family, sizes, 151936, 1e6, 1e-6, head_dim=128, **_tied(tied), **others)


def _qwen3_moe(*sizes: int, width: int) -> Section:
    experts = {"num_experts": 128, "top_k": 8, "intermediate_size": width, "aux_loss_coef": 0.001}
    return _qwen3(*sizes, family="qwen3-moe", experts=experts)


def _mixtral(*sizes: int, aux_loss_coef: float) -> Section:
    experts = {"num_experts": 8, "top_k": 2, "intermediate_size": sizes[4], "aux_loss_coef": aux_loss_coef}
    return _model("mixtral", sizes, 32000, 1e6, 1e-5, experts=experts)


def _tied(tied: bool) -> Section:
    return {"tie_word_embeddings": True} if tied else _NONE


_DEEPSEEK_MLA = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
_DEEPSEEK_EXPERTS = {
    **{"num_experts": 256, "top_k": 8, "intermediate_size": 2048, "shared_intermediate_size": 2048},
    **{"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "num_groups": 8, "topk_groups": 4},
    **{"aux_loss_coef": 0.0001, "bias_update_rate": 0.001, "first_k_dense": 3},
}
MODEL_SIZES: Mapping[str, Section] = {
    "llama-1b": _llama(16, 2048, 32, 8, 8192, tied=True),
    "llama-3b": _llama(28, 3072, 24, 8, 8192, tied=True),
    "llama-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-405b": _llama(126, 16384, 128, 8, 53248),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 6144, width=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, 12288, width=1536),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336, aux_loss_coef=0.02),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384, aux_loss_coef=0.001),
    "deepseek-v3": _model(
        *("deepseek-v3", (61, 7168, 128, 128, 18432), 129280, 1e4, 1e-6), mla=_DEEPSEEK_MLA, experts=_DEEPSEEK_EXPERTS
    ),
}
