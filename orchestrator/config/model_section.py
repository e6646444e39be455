"""The model section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pentad.orchestrator.config.errors import Broken
from pentad.orchestrator.config.sections import MOST, Count, CountOrZero, Section
from pentad.schedules.spec.model import MAX_LAYERS, LayerType, ModelSpec
from pentad.workers.hf.config import parse_section
from pentad.workers.hf.config_families import FAMILIES, OPTIONAL

CUSTOM_SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")  # arguments of a custom model's function
DenseFamily = Literal["llama", "qwen2", "qwen3", "mistral", "olmo2", "phi3", "gemma2", "gemma3"]
Family = Literal[DenseFamily, "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"]


class ExpertsSection(Section):
    """A mixture of experts."""

    num_experts: Count = Field(description="experts of a layer")
    top_k: Count = Field(description="experts that each token is routed to")
    intermediate_size: Count = Field(description="width of an expert")
    shared_intermediate_size: CountOrZero = 0
    """width of the shared expert that every token passes; 0: there is none"""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """function of the router's logits"""
    norm_topk_prob: bool = Field(default=True, description="normalise the weights of a token's experts to a sum of 1")
    routed_scaling_factor: PositiveFloat = Field(default=1.0, description="factor on the weights of a token's experts")
    num_groups: Count = Field(default=1, description="groups that the experts are divided into")
    topk_groups: Count = Field(default=1, description="groups that a token's experts are chosen from")
    aux_loss_coef: NonNegativeFloat = Field(default=0.0, description="weight of the load balancing loss")
    router_z_loss_coef: NonNegativeFloat = 0.0
    """weight of the router's z-loss, the mean squared log-sum-exp of its logits, which keeps them small"""
    bias_update_rate: NonNegativeFloat = 0.0
    """step by which routing biases balance the load without a loss; 0: they stay as they are"""
    first_k_dense: CountOrZero = Field(default=0, description="first layers, which have no experts")

    def rules(self) -> Iterator[Broken | str]:
        groups, eligible = self.num_groups, self.num_experts // self.num_groups * self.topk_groups
        if self.num_experts % groups:
            yield Broken("num_experts", f"a multiple of model.experts.num_groups = {groups}")
        if self.topk_groups > groups:
            yield Broken("topk_groups", f"at most model.experts.num_groups = {groups}")
        if self.top_k > eligible:
            yield Broken("top_k", f"at most {eligible}, the experts of {self.topk_groups} of {groups} groups")


class MLASection(Section):
    """Multi-head latent attention."""

    kv_lora_rank: Count = Field(description="width of the latent vector of keys and values")
    q_lora_rank: CountOrZero = 0
    """width of the latent vector of queries; 0: queries come from the residual stream"""
    qk_nope_head_dim: Count = Field(description="width of the part of a query and key without rotary embedding")
    qk_rope_head_dim: Count = Field(description="width of the part with rotary embedding, even")
    v_head_dim: Count = Field(description="width of a value")

    def rules(self) -> Iterator[Broken | str]:
        if self.qk_rope_head_dim % 2:
            yield Broken("qk_rope_head_dim", "an even width (rotary pairs)")


class RopeScalingSection(Section):
    """Rotary embedding for longer sequences."""

    rope_type: Literal["linear", "llama3", "yarn"] = Field(
        description="rule that scales wavelengths: all alike, Llama 3.1's or YaRN"
    )
    factor: PositiveFloat = Field(description="ratio of the new to the original sequence length")
    original_max_position_embeddings: Count = Field(default=1, description="sequence length of the original training")
    low_freq_factor: PositiveFloat = Field(default=1.0, description="Llama's low_freq_factor, or YaRN's beta_slow")
    high_freq_factor: PositiveFloat = Field(default=1.0, description="Llama's high_freq_factor, or YaRN's beta_fast")
    attention_factor: PositiveFloat = Field(default=1.0, description="factor on rotary cosines and sines (YaRN)")
    softmax_factor: PositiveFloat = Field(default=1.0, description="factor on attention scores (YaRN)")
    truncate: bool = Field(default=True, description="round the ends of the ramp between wavelengths (YaRN)")

    def rules(self) -> Iterator[Broken | str]:
        if self.rope_type != "linear" and self.high_freq_factor <= self.low_freq_factor:
            yield Broken("high_freq_factor", f"more than low_freq_factor = {self.low_freq_factor:g}")


class ModelSection(Section):
    """The model: a family of decoders by its sizes, or a custom one."""

    family: Family = Field(default="llama", description="architecture, by the name of a well-known model")
    custom: str | None = None
    """FILE.py:FUNCTION that returns a list of layers (docs/custom-model.md) in place of the family's; its parameters
    may be any of vocab, hidden, layers, heads, kv_heads, ffn and length"""
    layers: int = Field(ge=1, le=MAX_LAYERS, description="decoder layers, at least one for each pipeline stage")
    hidden: Count = Field(description="width of the residual stream")
    heads: Count = Field(description="query heads, a multiple of model.kv_heads")
    kv_heads: Count = Field(description="key-value heads, fewer than heads with grouped-query attention")
    ffn: Count = Field(description="width of the gated feed-forward network")
    vocab: int = Field(ge=2, le=MOST, description="size of the vocabulary, at least that of the corpus's tokenizer")
    rope_theta: PositiveFloat = Field(default=10_000.0, description="base of the rotary embedding's wavelengths")
    norm_eps: PositiveFloat = Field(default=1e-5, description="added to the mean square in RMSNorm")
    head_dim: CountOrZero = Field(default=0, description="width of a head; 0: hidden / heads")
    tie_word_embeddings: bool = Field(default=False, description="use the embedding as the output head")
    rope_scaling: RopeScalingSection | None = None
    """rotary embedding for longer sequences; null: unscaled"""
    sliding_window: CountOrZero = 0
    """tokens that a token attends to, itself included, in layers of type sliding_attention; 0: all before it, in every
    layer"""
    layer_types: list[LayerType] | None = Field(default=None, min_length=1)
    """full_attention or sliding_attention, repeated over the layers; null: as in the family's models"""
    rope_local_base_freq: NonNegativeFloat = 0.0
    """base of the rotary embedding's wavelengths, unscaled, in layers with a sliding window; 0: as in all layers"""
    query_pre_attn_scalar: CountOrZero = 0
    """attention scores are divided by its square root; 0: the width of a query"""
    attn_logit_softcapping: NonNegativeFloat = 0.0
    """attention scores s become c tanh(s / c); 0: they stay as they are"""
    final_logit_softcapping: NonNegativeFloat = Field(default=0.0, description="the same for the model's logits")
    mla: MLASection | None = Field(default=None, description="multi-head latent attention, of deepseek-v3")
    experts: ExpertsSection | None = None
    """mixture of experts, of mixtral, qwen3-moe, deepseek-v3 and gpt-oss"""
    mtp_layers: CountOrZero = 0
    """layers for multi-token prediction, one for each token beyond the next (deepseek-v3)"""
    mtp_loss_weight: PositiveFloat = Field(default=0.3, description="weight of the loss of those tokens")

    @model_validator(mode="before")
    @classmethod
    def _default_sizes_of_custom_models(cls, raw: Any) -> Any:
        """A custom model's function may ignore these sizes, so they have defaults."""
        if isinstance(raw, dict) and raw.get("custom") is not None:
            return dict.fromkeys(("layers", "heads", "kv_heads", "ffn"), 1) | raw
        return raw

    def rules(self) -> Iterator[Broken | str]:
        if self.custom is None:
            yield from self._head_rules()
        elif self.tie_word_embeddings:
            yield Broken("tie_word_embeddings", "false for model.custom, whose layers share nothing")
        family = FAMILIES[self.family]
        for name, expected in (("experts", family.experts is not None), ("mla", family.mla)):
            if expected != (getattr(self, name) is not None):
                yield Broken(name, f"{'a mapping' if expected else 'null'} for model.family = {self.family}")
        for key in OPTIONAL:
            default = type(self).model_fields[key].default
            if key not in family.keys and getattr(self, key) != default:
                yield Broken(key, f"{'null' if default is None else f'{default:g}'} for model.family = {self.family}")
        if not self.sliding_window and "sliding_attention" in (self.layer_types or ()):
            yield Broken("sliding_window", "at least 1 with sliding_attention in model.layer_types")
        if self.experts is not None and self.experts.first_k_dense >= self.layers:
            yield Broken("experts.first_k_dense", f"less than model.layers = {self.layers}")
        if self.mtp_layers and not family.mla:
            yield Broken("mtp_layers", f"0 for model.family = {self.family}")

    def _head_rules(self) -> Iterator[Broken]:
        heads = self.heads
        if heads % self.kv_heads:
            yield Broken("heads", f"a multiple of model.kv_heads = {self.kv_heads}")
        if self.mla is not None:
            return
        if self.head_dim % 2:
            yield Broken("head_dim", "an even head size (rotary pairs)")
        elif not self.head_dim and self.hidden % heads:
            yield Broken("hidden", f"a multiple of model.heads = {heads}")
        elif not self.head_dim and self.hidden // heads % 2:
            found = f"{self.hidden} / {heads} = {self.hidden // heads}"
            yield Broken("hidden / model.heads", "an even head size (rotary pairs)", found)

    @property
    def spec(self) -> ModelSpec:
        """The sizes of a family's model."""
        return parse_section(self.model_dump())[1]


def custom_model(section: ModelSection, length: int, dtype: str) -> ModelSpec:
    """The model that `section.custom` names, for sequences of `length` tokens. Raises PentadError if it cannot be
    trained."""
    import torch  # takes seconds, and only custom models need it here

    from pentad.workers.custom.inspect import inspect_model

    assert section.custom is not None
    sizes = {name: getattr(section, name) for name in CUSTOM_SIZES} | {"length": length}
    found = inspect_model(section.custom, sizes, getattr(torch, dtype))
    return ModelSpec(len(found.layers), section.hidden, 1, 1, 1, section.vocab, custom=found)
