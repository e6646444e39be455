"""What config.json looks like for each family of models, as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Names = Mapping[str, str]  # field of a spec -> key of config.json
Values = Mapping[str, Any]  # by key of config.json

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
}
# What pentad supports, in all families: keys that are written, and others that are only checked.
WRITTEN: Values = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
CHECKED: Values = {"mlp_bias": False, "use_sliding_window": False, "partial_rotary_factor": 1, "router_jitter_noise": 0}


class Family(NamedTuple):
    """A family of models by its names in transformers; `experts` are the keys of fields of `Experts`.

    `defaults` are those that differ from DEFAULTS. `fixed` keys have one value that pentad supports; it is written too.
    """

    model_type: str
    architecture: str
    experts: Names | None = None
    qk_norm: bool = False
    mla: bool = False
    defaults: Values = MappingProxyType({})
    fixed: Values = MappingProxyType({})


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128}),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        {
            "num_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "intermediate_size": "intermediate_size",
            "aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed={"sliding_window": None},
    ),
    "qwen3-moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "intermediate_size": "moe_intermediate_size",
            "norm_topk_prob": "norm_topk_prob",
            "aux_loss_coef": "router_aux_loss_coef",
        },
        qk_norm=True,
        defaults={"num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            "num_experts": "n_routed_experts",
            "top_k": "num_experts_per_tok",
            "intermediate_size": "moe_intermediate_size",
            "norm_topk_prob": "norm_topk_prob",
            "routed_scaling_factor": "routed_scaling_factor",
            "num_groups": "n_group",
            "topk_groups": "topk_group",
            "first_k_dense": "first_k_dense_replace",
        },
        mla=True,
        # The norms inside its attention have this epsilon, whatever rms_norm_eps is.
        fixed={"rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
}
