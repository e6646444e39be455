"""Small models of every supported family, with sizes that divide over several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plans import MODEL

from pentad.schedules.spec.model import MLA, Experts, RopeScaling

HEADS = replace(MODEL, kv_heads=4)  # enough heads for Ulysses
ROUTED = Experts(
    num_experts=4,
    top_k=2,
    intermediate_size=12,
    shared_intermediate_size=8,
    aux_loss_coef=0.1,
    router_z_loss_coef=0.05,
    bias_update_rate=0.01,
    first_k_dense=1,
)
MOE = replace(MODEL, experts=ROUTED)
GEMMA: dict[str, Any] = {
    "norms": "both",
    "norm_offset": 1.0,
    "hidden_act": "gelu_pytorch_tanh",
    "scale_embedding": True,
    "sliding_window": 3,
    "layer_types": ("sliding_attention", "full_attention"),
}
FAMILIES = {
    "llama 3.1": replace(MODEL, rope_scaling=RopeScaling("llama3", 4.0, 4, 1.0, 4.0)),
    "qwen2": replace(MODEL, qkv_bias=True),
    "mistral": replace(MODEL, sliding_window=3, layer_types=("sliding_attention",)),
    "olmo2": replace(MODEL, qk_norm="all_heads", norms="after"),
    "gemma2": replace(
        MODEL,
        **GEMMA,
        tie_word_embeddings=True,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=1.5,
    ),
    "gemma3": replace(
        MODEL, **GEMMA, qk_norm="head", rope_local_base_freq=50.0, rope_scaling=RopeScaling("linear", 4.0)
    ),
    "gpt-oss": replace(
        MODEL,
        qkv_bias=True,
        out_bias=True,
        attention_sinks=True,
        expert_biases=True,
        hidden_act="clamped_silu",
        sliding_window=3,
        layer_types=("sliding_attention", "full_attention"),
        experts=Experts(num_experts=4, top_k=2, intermediate_size=12),
        rope_scaling=RopeScaling("yarn", 4.0, 4, 1.0, 32.0, attention_factor=1.2, truncate=False),
    ),
    "qwen3": replace(MODEL, head_dim=6, qk_norm="head", tie_word_embeddings=True),
    "mixtral": replace(MODEL, experts=Experts(num_experts=4, top_k=2, intermediate_size=12)),
    "qwen3-moe": replace(MODEL, head_dim=6, qk_norm="head", experts=Experts(4, 3, 8, norm_topk_prob=False)),
    "deepseek-v3": replace(
        MODEL,
        layers=4,
        kv_heads=4,
        mla=MLA(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
        experts=Experts(
            8, 3, 6, 4, "sigmoid", True, 2.5, num_groups=4, topk_groups=2, bias_update_rate=0.01, first_k_dense=1
        ),
        rope_scaling=RopeScaling("yarn", 4.0, 4, 1.0, 32.0, attention_factor=1.2, softmax_factor=1.3),
    ),
    "deepseek-v2-lite": replace(
        MODEL, kv_heads=4, mla=MLA(kv_lora_rank=6, q_lora_rank=0, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=8)
    ),
}
# For GPUs: large enough for the kernels.
WIDE = replace(MODEL, hidden=64, heads=8, kv_heads=8, ffn=64, head_dim=16)
WIDE_MOE = replace(WIDE, layers=4, experts=replace(ROUTED, intermediate_size=32, shared_intermediate_size=32))
LATENT_MOE = replace(
    WIDE_MOE,
    head_dim=0,
    mla=MLA(kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    experts=replace(WIDE_MOE.experts or ROUTED, scoring_func="sigmoid", bias_update_rate=0.0),
)
