"""Sizes of a model: everything that its layers, its planner and its files have to agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from a vector of
    `rank` a token; a head's query and key are `plain` + `rotary` wide, its value `value`.

    `query_rank` is the width that queries come from; 0: straight from the residual stream.
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` gated feed-forward networks of width `ffn`, of which each token visits `active`.

    `shared` is the width of one that every token visits besides (0: none). `score` makes probabilities of the router's
    products; the chosen ones are divided by their sum with `normalized` and then times `scale`. With `groups` > 1 the
    experts stand in so many equal groups and a token visits `active_groups` of them (node-limited routing,
    DeepSeek-V3, arXiv 2412.19437, 2.1.2). `auxiliary` is the weight of the balance loss (Switch Transformers,
    arXiv 2101.03961, 2.2); `bias_rate` what an expert's bias moves a step towards an even load (arXiv 2408.15664), 0:
    there is no bias. The first `dense` layers of the model have no experts.
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
    """Longer wavelengths for the rotary embedding, as Llama 3.1 ('llama3') and YaRN (arXiv 2309.00071, 'yarn') do.

    `original` is the length that the model was first trained with; `low` and `high` are Llama's frequency factors, or
    YaRN's beta_slow and beta_fast; `attention` is what YaRN multiplies cos and sin by, and `softmax` the scores.
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
    """A layer of a user's own: its parameters by name and shape, the FLOPs that products count in the forward of one
    sequence, and whether it draws random numbers."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    flops: int
    is_random: bool


@dataclass(frozen=True)
class CustomModel:
    """A model of a user's own for sequences of `length` tokens: what `text` = 'FILE.py:FUNCTION' returns, called with
    these `sizes` by name. `source` is what the file held when the run began."""

    text: str
    source: str
    length: int
    sizes: tuple[tuple[str, int], ...]
    layers: tuple[CustomLayer, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with pre-norms, rotary positions and gated feed-forward layers: `heads` query heads share
    `kv_heads` key-value heads of width `head_dim`.

    `head_size` 0 means hidden / heads. `qk_norm`: queries and keys are normed head by head (Qwen3). `tied`: the output
    head is the embedding. `predicted` tokens beyond the next one have a layer each (multi-token prediction,
    arXiv 2412.19437, 2.2), whose loss counts `predicted_weight` over their number. With a model of the user's `own`
    `layers` are those of its list, and only `hidden` and `vocab` say more.
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
        """Width of a query and of a key."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def softmax_scale(self) -> float | None:
        """What attention scores are multiplied by, where it is not 1 / sqrt(head_dim)."""
        if self.rope_scaling is None or self.rope_scaling.softmax_factor == 1.0:
            return None
        return self.rope_scaling.softmax_factor / math.sqrt(self.qk_head_dim)
