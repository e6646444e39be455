"""The model section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pentad.orchestrator.config.sections import Count, NonNegative, Positive, Section
from pentad.schedules.spec.model import MLA, Experts, ModelSpec, RopeScaling

CUSTOM_SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")  # arguments of a custom model's function
Family = Literal["llama", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3"]


class Traits(NamedTuple):
    """What a family always has, or never."""

    qk_norm: bool
    experts: bool
    mla: bool


FAMILIES: dict[Family, Traits] = {
    "llama": Traits(qk_norm=False, experts=False, mla=False),
    "qwen3": Traits(qk_norm=True, experts=False, mla=False),
    "mixtral": Traits(qk_norm=False, experts=True, mla=False),
    "qwen3-moe": Traits(qk_norm=True, experts=True, mla=False),
    "deepseek-v3": Traits(qk_norm=False, experts=True, mla=True),
}


class ExpertsSection(Section):
    """A mixture of experts."""

    num_experts: Count = Field(description="experts of a layer")
    top_k: Count = Field(description="experts that each token is routed to")
    intermediate_size: Count = Field(description="width of an expert")
    shared_intermediate_size: NonNegative = Field(
        default=0, description="width of the shared expert that every token passes; 0: there is none"
    )
    scoring_func: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="function of the router's logits"
    )
    norm_topk_prob: bool = Field(default=True, description="normalise the weights of a token's experts to a sum of 1")
    routed_scaling_factor: Positive = Field(default=1.0, description="factor on the weights of a token's experts")
    num_groups: Count = Field(default=1, description="groups that the experts are divided into")
    topk_groups: Count = Field(default=1, description="groups that a token's experts are chosen from")
    aux_loss_coef: float = Field(default=0.0, ge=0, description="weight of the load balancing loss")
    bias_update_rate: float = Field(
        default=0.0, ge=0, description="step by which routing biases balance the load without a loss; 0: no biases"
    )
    first_k_dense: NonNegative = Field(default=0, description="first layers, which have no experts")

    def rules(self) -> Iterator[str]:
        if self.num_experts % self.num_groups:
            expected = f"a multiple of model.experts.num_groups = {self.num_groups}"
            yield f"model.experts.num_experts is {self.num_experts}: expected {expected}"
        if self.topk_groups > self.num_groups:
            expected = f"at most model.experts.num_groups = {self.num_groups}"
            yield f"model.experts.topk_groups is {self.topk_groups}: expected {expected}"
        eligible = self.num_experts // self.num_groups * self.topk_groups
        if self.top_k > eligible:
            expected = f"at most {eligible}, the experts of {self.topk_groups} of {self.num_groups} groups"
            yield f"model.experts.top_k is {self.top_k}: expected {expected}"


class MLASection(Section):
    """Multi-head latent attention."""

    kv_lora_rank: Count = Field(description="width of the latent vector of keys and values")
    q_lora_rank: NonNegative = Field(
        default=0, description="width of the latent vector of queries; 0: queries come from the residual stream"
    )
    qk_nope_head_dim: Count = Field(description="width of the part of a query and key without rotary embedding")
    qk_rope_head_dim: Count = Field(description="width of the part with rotary embedding, even")
    v_head_dim: Count = Field(description="width of a value")

    def rules(self) -> Iterator[str]:
        if self.qk_rope_head_dim % 2:
            yield f"model.mla.qk_rope_head_dim is {self.qk_rope_head_dim}: expected an even width (rotary pairs)"


class RopeScalingSection(Section):
    """Rotary embedding for longer sequences."""

    rope_type: Literal["llama3", "yarn"] = Field(description="rule that scales wavelengths: Llama 3.1's or YaRN")
    factor: Positive = Field(description="ratio of the new to the original sequence length")
    original_max_position_embeddings: Count = Field(description="sequence length of the original training")
    low_freq_factor: Positive = Field(description="Llama's low_freq_factor, or YaRN's beta_slow")
    high_freq_factor: Positive = Field(description="Llama's high_freq_factor, or YaRN's beta_fast")
    attention_factor: Positive = Field(default=1.0, description="factor on rotary cosines and sines (YaRN)")
    softmax_factor: Positive = Field(default=1.0, description="factor on attention scores (YaRN)")


class ModelSection(Section):
    """The model: a family of decoders by its sizes, or a custom one."""

    family: Family = Field(default="llama", description="architecture, by the name of a well-known model")
    custom: str | None = Field(
        default=None,
        description="FILE.py:FUNCTION that returns a list of layers (docs/custom-model.md) in place of the family's; "
        "its parameters may be any of vocab, hidden, layers, heads, kv_heads, ffn and length",
    )
    layers: int = Field(ge=1, le=10_000, description="decoder layers, at least one for each pipeline stage")
    hidden: Count = Field(description="width of the residual stream")
    heads: Count = Field(description="query heads, a multiple of model.kv_heads")
    kv_heads: Count = Field(description="key-value heads, fewer than heads with grouped-query attention")
    ffn: Count = Field(description="width of the gated feed-forward network")
    vocab: int = Field(ge=2, description="size of the vocabulary, at least that of the corpus's tokenizer")
    rope_theta: Positive = Field(default=10_000.0, description="base of the rotary embedding's wavelengths")
    norm_eps: Positive = Field(default=1e-5, description="added to the mean square in RMSNorm")
    head_dim: NonNegative = Field(default=0, description="width of a head; 0: hidden / heads")
    tie_word_embeddings: bool = Field(default=False, description="use the embedding as the output head")
    rope_scaling: RopeScalingSection | None = Field(
        default=None, description="rotary embedding for longer sequences; null: unscaled"
    )
    mla: MLASection | None = Field(default=None, description="multi-head latent attention, of deepseek-v3")
    experts: ExpertsSection | None = Field(
        default=None, description="mixture of experts, of mixtral, qwen3-moe and deepseek-v3"
    )
    mtp_layers: NonNegative = Field(
        default=0, description="layers for multi-token prediction, one for each token beyond the next (deepseek-v3)"
    )
    mtp_loss_weight: Positive = Field(default=0.3, description="weight of the loss of those tokens")

    @model_validator(mode="before")
    @classmethod
    def _default_sizes_of_custom_models(cls, raw: Any) -> Any:
        """A custom model's function may ignore these sizes."""
        if isinstance(raw, dict) and raw.get("custom") is not None:
            return dict.fromkeys(("layers", "heads", "kv_heads", "ffn"), 1) | raw
        return raw

    def rules(self) -> Iterator[str]:
        if self.custom is None:
            yield from self._head_rules()
        elif self.tie_word_embeddings:
            yield "model.tie_word_embeddings is true: expected false for model.custom, whose layers share nothing"
        yield from self._family_rules()

    def _head_rules(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            yield f"model.heads is {self.heads}: expected a multiple of model.kv_heads = {self.kv_heads}"
        if self.mla is not None:
            return
        if self.head_dim % 2:
            yield f"model.head_dim is {self.head_dim}: expected an even head size (rotary pairs)"
        if self.head_dim:
            return
        if self.hidden % self.heads:
            yield f"model.hidden is {self.hidden}: expected a multiple of model.heads = {self.heads}"
        elif self.hidden // self.heads % 2:
            size = f"{self.hidden} / {self.heads} = {self.hidden // self.heads}"
            yield f"model.hidden / model.heads is {size}: expected an even head size (rotary pairs)"

    def _family_rules(self) -> Iterator[str]:
        traits = FAMILIES[self.family]
        for name, expected in (("experts", traits.experts), ("mla", traits.mla)):
            found = getattr(self, name)
            if expected and found is None:
                yield f"model.{name} is null: expected a mapping for model.family = {self.family}"
            if not expected and found is not None:
                yield f"model.{name} is a mapping: expected null for model.family = {self.family}"
        dense = self.experts.first_k_dense if self.experts is not None else 0
        if dense >= self.layers:
            yield f"model.experts.first_k_dense is {dense}: expected less than model.layers = {self.layers}"
        if self.mtp_layers and not traits.mla:
            yield f"model.mtp_layers is {self.mtp_layers}: expected 0 for model.family = {self.family}"

    @property
    def shape(self) -> ModelSpec:
        found = self.model_dump(exclude={"family", "custom"})
        parts = {"rope_scaling": RopeScaling, "mla": MLA, "experts": Experts}
        made = {name: part(**found[name]) if found[name] else None for name, part in parts.items()}
        return ModelSpec(**{**found, **made}, qk_norm=FAMILIES[self.family].qk_norm)


def custom_model(section: ModelSection, length: int, dtype: str) -> ModelSpec:
    """The model that `section.custom` names, for sequences of `length` tokens. Raises PentadError if it cannot be
    trained."""
    import torch  # takes seconds, and only custom models need it here

    from pentad.workers.custom.inspect import inspect_model

    assert section.custom is not None
    sizes = {name: getattr(section, name) for name in CUSTOM_SIZES} | {"length": length}
    found = inspect_model(section.custom, sizes, getattr(torch, dtype))
    return ModelSpec(len(found.layers), section.hidden, 1, 1, 1, section.vocab, custom=found)
