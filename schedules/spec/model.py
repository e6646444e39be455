"""Architecture of a model: what its layers, the planner and the checkpoint formats have to agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

QKNorm = Literal["head", "all_heads"]
NormPlacement = Literal["before", "after", "both"]
HiddenAct = Literal["silu", "gelu_pytorch_tanh", "clamped_silu"]
MAX_LAYERS = 10_000
LayerType = Literal["full_attention", "sliding_attention"]
Scaling = Literal["tensor", "row", "block"]


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

    `aux_loss_coef` weighs the load balancing loss (Switch Transformers, arXiv 2101.03961, section 2.2),
    `router_z_loss_coef` the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906, eq. 5).
    `bias_update_rate` is how much an expert's bias moves per step towards an even load (arXiv 2408.15664); 0: it stays.
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
    router_z_loss_coef: float = 0.0

    @property
    def has_bias(self) -> bool:
        """Whether experts have routing biases: with sigmoid scores always, as in DeepSeek-V3."""
        return self.scoring_func == "sigmoid" or self.bias_update_rate > 0


@dataclass(frozen=True)
class RopeScaling:
    """Longer wavelengths of the rotary embedding: all of them ('linear'), or as in Llama 3.1 ('llama3') or YaRN
    (arXiv 2309.00071, 'yarn').

    `original_max_position_embeddings` is the sequence length of the original training. `low_freq_factor` and
    `high_freq_factor` are Llama's, or YaRN's beta_slow and beta_fast. YaRN multiplies cos and sin by `attention_factor`
    and attention scores by `softmax_factor`, and rounds the ends of its ramp to whole pairs with `truncate`.
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0
    softmax_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LayerKind:
    """What differs between the layers of a model. A token attends to the last `window` tokens, itself included, or to
    all before it (0)."""

    window: int
    rope_theta: float
    rope_scaling: RopeScaling | None


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
class Fp8Spec:
    """Which products of decoder layers are in 8 bits, in F, B and W: the projections of attention, except those to
    latents, and of dense feed-forward networks; also of `shared_experts` and, with block scales, of `experts`.
    `scaling`, `gradients` and `power_of_two` are the recipe's (kernels/fp8/fp8_tensor.py). The first `skip_first` and
    the last `skip_last` layers of the model stay in the compute dtype. Every `sample_every` steps it is measured how
    well operands fit into 8 bits, and every `compare_every` steps gradients are compared with those in the compute
    dtype (0: never). With `delayed`, a tensor of activations or gradients has the scale of the step before. With
    `head`, the output head multiplies in 8 bits, but not where multi-token prediction uses it. With `gathers`, ZeRO-3
    gathers the matrices of layers in 8 bits, which row scales do not allow: B needs those of columns."""

    scaling: Scaling
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = False
    skip_first: int = 0
    skip_last: int = 0
    sample_every: int = 0
    experts: bool = False
    compare_every: int = 0
    shared_experts: bool = False
    delayed: bool = False
    head: bool = False
    gathers: bool = False

    def samples(self, step: int) -> bool:
        return self.sample_every > 0 and step % self.sample_every == 0

    def compares(self, step: int) -> bool:
        return self.compare_every > 0 and step % self.compare_every == 0

    def covers(self, layer: int, layers: int) -> bool:
        """Whether layer number `layer` of this many has products in 8 bits."""
        return self.skip_first <= layer < layers - self.skip_last


@dataclass(frozen=True)
class ModelSpec:
    """A decoder with RMSNorms, rotary positions and gated MLPs; `heads` query heads share `kv_heads` key-value heads.

    `head_dim` 0 means hidden / heads, `query_pre_attn_scalar` 0 the width of a query: attention scores are divided by
    its square root. With `attn_logit_softcapping` c > 0 a score s becomes c tanh(s / c); `final_logit_softcapping` does
    the same for logits (Gemma 2, arXiv 2408.00118, section 2). `attention_sinks` adds one score per head to every
    softmax of attention, without a value (arXiv 2309.17453). `qkv_bias` adds biases to the projections of queries, keys
    and values, `out_bias` to that of the heads' output, `expert_biases` to the router and the experts.

    `qk_norm` normalizes queries and keys, each head by itself (Qwen3) or all heads as one vector (OLMo 2, arXiv
    2501.00656, section 3.2). `norms` are before a sublayer, after it (before the addition to the residual stream), or
    both; their weights are stored minus `norm_offset`. With `scale_embedding` the embedding is multiplied by the square
    root of `hidden`, rounded to the dtype of compute.

    `layer_types`, repeated over the layers, says which of them attend to the last `sliding_window` tokens only; those
    have rotary embeddings of base `rope_local_base_freq`, unscaled, unless it is 0.

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
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0
    layer_types: tuple[LayerType, ...] = ("full_attention",)
    rope_local_base_freq: float = 0.0
    query_pre_attn_scalar: int = 0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    mla: MLA | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    custom: CustomModel | None = None
    qkv_bias: bool = False
    qk_norm: QKNorm | None = None
    norms: NormPlacement = "before"
    norm_offset: float = 0.0
    hidden_act: HiddenAct = "silu"
    scale_embedding: bool = False
    out_bias: bool = False
    attention_sinks: bool = False
    expert_biases: bool = False

    def __hash__(self) -> int:
        """Covers only what usually differs, for speed: many caches have models in their keys."""
        return hash((self.layers, self.hidden, self.heads, self.ffn, self.vocab))

    @property
    def dense_layers(self) -> int:
        """The number of layers at the start that have no experts."""
        return self.layers if self.experts is None else self.experts.first_k_dense

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head's query and key with rotary positions."""
        return self.qk_head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores."""
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.softmax_factor
        return factor / math.sqrt(self.query_pre_attn_scalar or self.qk_head_dim)

    def window(self, layer: int) -> int:
        """Tokens that a layer's queries attend to at most; 0: all before them."""
        is_full = not self.sliding_window or self.layer_types[layer % len(self.layer_types)] == "full_attention"
        return 0 if is_full else self.sliding_window

    def layer_kind(self, layer: int) -> LayerKind:
        if not self.window(layer):
            return LayerKind(0, self.rope_theta, self.rope_scaling)
        if self.rope_local_base_freq:
            return LayerKind(self.sliding_window, self.rope_local_base_freq, None)
        return LayerKind(self.sliding_window, self.rope_theta, self.rope_scaling)

    def attended_length(self, layer: int, length: int) -> float:
        """The sequence length at which full causal attention does as much work per token as this layer's: 2 w - w^2 /
        length for a window of w tokens."""
        window = self.window(layer)
        return 2 * window - window**2 / length if 0 < window < length else length
