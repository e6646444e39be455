"""The form of config.json for each family of models, as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pentad.schedules.spec.model import LayerType

Names = Mapping[str, str]  # field of a spec -> key of config.json
Values = Mapping[str, Any]  # by key, mostly of config.json

MODEL: Names = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
DEFAULTS: Values = {
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "q_lora_rank": 0},
    **{"num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "routed_scaling_factor": 2.5},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    **{"query_pre_attn_scalar": 256, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0},
}
# The only supported values, in all families, of keys that are written, and of others that are only checked.
WRITTEN: Values = {"hidden_act": "silu", "attention_dropout": 0.0}
CHECKED: Values = {
    **{"attention_bias": False, "mlp_bias": False, "use_bidirectional_attention": False},
    **{"partial_rotary_factor": 1, "router_jitter_noise": 0},
}
# Fields of `ModelSpec` that a family implies.
TRAITS = (
    *("qkv_bias", "out_bias", "expert_biases", "attention_sinks", "qk_norm"),
    *("norms", "norm_offset", "hidden_act", "scale_embedding"),
)
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"


class Family(NamedTuple):
    """A family of models by its names in transformers; `experts` maps fields of `Experts` to keys.

    `traits` are the fields in TRAITS that differ from their defaults; `optional` maps fields that only some families
    have to keys. `layer_types` is the pattern repeated over the layers if there is a `sliding_window`, unless
    config.json says otherwise; if empty, the family has no windows. `defaults` are those that differ from DEFAULTS.
    `fixed` keys have a single supported value, which is also written.
    """

    model_type: str
    architecture: str
    experts: Names | None = None
    mla: bool = False
    traits: Values = MappingProxyType({})
    optional: Names = MappingProxyType({})
    layer_types: tuple[LayerType, ...] = ()
    defaults: Values = MappingProxyType({})
    fixed: Values = MappingProxyType({})

    @property
    def keys(self) -> set[str]:
        """The fields of a model section that this family has and some others lack."""
        return {*self.optional, *(("sliding_window", "layer_types") if self.layer_types else ())}


# Fields of a model section that only some families have.
OPTIONAL = (
    *("sliding_window", "layer_types", "rope_local_base_freq"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
_GEMMA: Values = {"norms": "both", "norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh", "scale_embedding": True}
_GEMMA_KEYS = {name: name for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")}
_GEMMA_DEFAULTS: Values = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
_GEMMA_FIXED: Values = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _experts(count: str, width: str, **others: str) -> Names:
    return {"num_experts": count, "top_k": "num_experts_per_tok", "intermediate_size": width, **others}


_MIXTRAL_EXPERTS = _experts("num_local_experts", "intermediate_size", aux_loss_coef="router_aux_loss_coef")
_QWEN_EXPERTS = _experts(
    *("num_experts", "moe_intermediate_size"), norm_topk_prob="norm_topk_prob", aux_loss_coef="router_aux_loss_coef"
)
_DEEPSEEK_EXPERTS = _experts(
    *("n_routed_experts", "moe_intermediate_size"),
    norm_topk_prob="norm_topk_prob",
    routed_scaling_factor="routed_scaling_factor",
    num_groups="n_group",
    topk_groups="topk_group",
    first_k_dense="first_k_dense_replace",
)
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM"),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", traits={"qkv_bias": True}, layer_types=(SLIDING,)),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", traits={"qk_norm": "head"}, layer_types=(SLIDING,), defaults={"head_dim": 128}
    ),
    "mistral": Family("mistral", "MistralForCausalLM", layer_types=(SLIDING,), defaults={"sliding_window": 4096}),
    "olmo2": Family(
        "olmo2", "Olmo2ForCausalLM", traits={"qk_norm": "all_heads", "norms": "after"}, defaults={"rms_norm_eps": 1e-5}
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        traits=_GEMMA,
        optional=_GEMMA_KEYS,
        layer_types=(SLIDING, FULL),
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed=_GEMMA_FIXED,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        traits={**_GEMMA, "qk_norm": "head"},
        optional={"query_pre_attn_scalar": "query_pre_attn_scalar", "rope_local_base_freq": "rope_local_base_freq"},
        layer_types=(*(SLIDING,) * 5, FULL),
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        fixed={**_GEMMA_FIXED, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        layer_types=(SLIDING,),
        defaults={"rms_norm_eps": 1e-5},
        fixed={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        _MIXTRAL_EXPERTS,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed={"sliding_window": None},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _MIXTRAL_EXPERTS,
        traits={
            **dict.fromkeys(("qkv_bias", "out_bias", "expert_biases", "attention_sinks"), True),
            "hidden_act": "clamped_silu",
        },
        layer_types=(SLIDING, FULL),
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "sliding_window": 128},
            "num_experts_per_tok": 4,
        },
        fixed={"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    ),
    "qwen3-moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _QWEN_EXPERTS,
        traits={"qk_norm": "head"},
        defaults={"num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_EXPERTS,
        mla=True,
        # rms_norm_eps must be the epsilon that transformers hard-codes in the norms inside attention.
        fixed={"rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
}
