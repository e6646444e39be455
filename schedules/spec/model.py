"""Architecture of a model: what its layers, the planner and the checkpoint formats have to agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values are projected up from a vector of `kv_lora_rank` per token, queries from one of `q_lora_rank` (0:
    straight from the residual stream). A head's query and key are `qk_nope_head_dim` + `qk_rope_head_dim` wide (without
    and with rotary positions), its value `v_head_dim`.
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Experts:
    """Mixture of `num_experts` gated MLPs of width `intermediate_size`, of which each token visits `top_k`.

    `shared_intermediate_size` is the width of an MLP that every token visits as well (0: none). `scoring_func` turns
    router logits into scores; with `norm_topk_prob` the chosen scores are normalized to sum 1, then multiplied by
    `routed_scaling_factor`. With `num_groups` > 1 the experts form that many equal groups and a token visits only
    `topk_groups` of them (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    `aux_loss_coef` weighs the load balancing loss (Switch Transformers, arXiv 2101.03961, section 2.2).
    `bias_update_rate` is how much an expert's bias moves per step towards an even load (arXiv 2408.15664); 0: no bias.
    The first `first_k_dense` layers of the model have no experts.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    aux_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    first_k_dense: int = 0


@dataclass(frozen=True)
class RopeScaling:
    """Longer wavelengths of the rotary embedding, as in Llama 3.1 ('llama3') or YaRN (arXiv 2309.00071, 'yarn').

    `original_max_position_embeddings` is the sequence length of the first training. `low_freq_factor` and
    `high_freq_factor` are Llama's, or YaRN's beta_slow and beta_fast. YaRN multiplies cos and sin by
    `attention_factor` and attention scores by `softmax_factor`.
    """

    rope_type: Literal["llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


@dataclass(frozen=True)
class CustomLayer:
    """A layer of a custom model: its parameters by name and shape, the FLOPs of matrix products in the forward of one
    sequence, and whether it draws random numbers."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    flops: int
    is_random: bool


@dataclass(frozen=True)
class CustomModel:
    """A user's own model for sequences of `length` tokens: what `text` = 'FILE.py:FUNCTION' returns when it is called
    with `sizes` as keyword arguments. `source` is the content of the file when the run began."""

    text: str
    source: str
    length: int
    sizes: tuple[tuple[str, int], ...]
    layers: tuple[CustomLayer, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder with pre-norms, rotary positions and gated MLPs; `heads` query heads share `kv_heads` key-value heads.

    `head_dim` 0 means hidden / heads. With `qk_norm`, queries and keys are normalized per head (Qwen3).
    `mtp_layers` layers predict one further token each (multi-token prediction, arXiv 2412.19437, section 2.2); their
    losses are averaged and weighted by `mtp_loss_weight`. For a `custom` model, `layers` is the length of its list of
    layers, and of the other fields only `hidden` and `vocab` have a meaning.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    head_dim: int = 0
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    mla: MLA | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    custom: CustomModel | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def softmax_scale(self) -> float | None:
        """Factor on attention scores; None: 1 / sqrt(qk_head_dim)."""
        if self.rope_scaling is None or self.rope_scaling.softmax_factor == 1.0:
            return None
        return self.rope_scaling.softmax_factor / math.sqrt(self.qk_head_dim)
