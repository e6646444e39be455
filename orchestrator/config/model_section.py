"""The section of a run's configuration that says what is trained."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pentad.orchestrator.config.sections import Count, NonNegative, Positive, Section
from pentad.schedules.spec.model import MLA, Experts, ModelShape, RopeScaling

Family = Literal["llama", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3"]


class Traits(NamedTuple):
    """What a family always has, or never."""

    qk_norm: bool
    experts: bool
    latent: bool


FAMILIES: dict[Family, Traits] = {
    "llama": Traits(qk_norm=False, experts=False, latent=False),
    "qwen3": Traits(qk_norm=True, experts=False, latent=False),
    "mixtral": Traits(qk_norm=False, experts=True, latent=False),
    "qwen3-moe": Traits(qk_norm=True, experts=True, latent=False),
    "deepseek-v3": Traits(qk_norm=False, experts=True, latent=True),
}


class ExpertsSection(Section):
    count: Count = Field(description="experts of a layer")
    active: Count = Field(description="experts that a token visits")
    ffn: Count = Field(description="width of an expert")
    shared: NonNegative = Field(default=0, description="width of a gated network that every token visits besides")
    score: Literal["softmax", "sigmoid"] = Field(default="softmax", description="what makes probabilities of products")
    normalized: bool = Field(default=True, description="whether the weights of the visited experts add up to one")
    scale: Positive = Field(default=1.0, description="factor on the weights of visited experts")
    groups: Count = Field(default=1, description="equal groups of experts")
    active_groups: Count = Field(default=1, description="groups that a token's experts come from")
    auxiliary: float = Field(default=0.0, ge=0, description="weight of the loss that balances experts")
    bias_rate: float = Field(default=0.0, ge=0, description="step of the bias that balances experts; 0: there is none")
    dense: NonNegative = Field(default=0, description="first layers that have no experts")

    @model_validator(mode="after")
    def _visits_fit(self) -> ExpertsSection:
        if self.count % self.groups:
            wanted = f"a multiple of model.experts.groups = {self.groups}"
            raise ValueError(f"model.experts.count is {self.count}, wanted {wanted}")
        if self.active_groups > self.groups:
            wanted = f"at most model.experts.groups = {self.groups}"
            raise ValueError(f"model.experts.active_groups is {self.active_groups}, wanted {wanted}")
        reached = self.count // self.groups * self.active_groups
        if self.active > reached:
            wanted = f"at most {reached}, the experts of {self.active_groups} of {self.groups} groups"
            raise ValueError(f"model.experts.active is {self.active}, wanted {wanted}")
        return self


class LatentSection(Section):
    rank: Count = Field(description="width of the vector that keys and values come from")
    query_rank: NonNegative = Field(default=0, description="width that queries come from; 0: the residual stream")
    plain: Count = Field(description="width of a head's query and key without positions")
    rotary: Count = Field(description="width of a head's query and key with positions, even")
    value: Count = Field(description="width of a head's value")

    @model_validator(mode="after")
    def _pairs(self) -> LatentSection:
        if self.rotary % 2:
            raise ValueError(f"model.latent.rotary is {self.rotary}, wanted an even width (rotary pairs)")
        return self


class ScalingSection(Section):
    kind: Literal["llama3", "yarn"] = Field(description="which rule makes wavelengths longer")
    factor: Positive = Field(description="how many times longer sequences become")
    original: Count = Field(description="length that the model was first trained with")
    low: Positive = Field(description="Llama's low frequency factor, or YaRN's beta_slow")
    high: Positive = Field(description="Llama's high frequency factor, or YaRN's beta_fast")
    attention: Positive = Field(default=1.0, description="factor on rotary cosines and sines (YaRN)")
    softmax: Positive = Field(default=1.0, description="factor on attention scores (YaRN)")


class ModelSection(Section):
    family: Family = Field(default="llama", description="architecture, by the name of its first model")
    own: str | None = Field(
        default=None,
        description="FILE.py:FUNCTION that returns a list of layers (docs/own-model.md) in place of the family's; it "
        "takes what it needs of vocab, hidden, layers, heads, kv_heads, ffn and length, by name",
    )
    layers: int = Field(ge=1, le=10_000, description="decoder layers, at least one a pipeline stage")
    hidden: Count = Field(description="width of the residual stream, a multiple of model.heads")
    heads: Count = Field(description="query heads, a multiple of model.kv_heads")
    kv_heads: Count = Field(description="key-value heads, each shared by heads / kv_heads query heads")
    ffn: Count = Field(description="width of the gated feed-forward layer")
    vocab: int = Field(ge=2, description="tokens the model knows, at least those of the tokenizer")
    rope_theta: Positive = Field(default=10_000.0, description="base of the rotary embedding's wavelengths")
    norm_eps: Positive = Field(default=1e-5, description="added to the mean square in RMSNorm")
    head_size: NonNegative = Field(default=0, description="width of a head; 0: hidden / heads")
    tied: bool = Field(default=False, description="whether the output head is the embedding")
    scaling: ScalingSection | None = Field(default=None, description="longer rotary wavelengths; null: none")
    latent: LatentSection | None = Field(default=None, description="latent attention (deepseek-v3)")
    experts: ExpertsSection | None = Field(default=None, description="mixture of experts, of families that have one")
    predicted: NonNegative = Field(default=0, description="tokens beyond the next one that are predicted (deepseek-v3)")
    predicted_weight: Positive = Field(default=0.3, description="weight of the loss of those tokens")

    @model_validator(mode="before")
    @classmethod
    def _may_be_ones_own(cls, raw: Any) -> Any:
        """Sizes that a function of the user's does not take need no value."""
        if isinstance(raw, dict) and raw.get("own") is not None:
            return dict.fromkeys(("layers", "heads", "kv_heads", "ffn"), 1) | raw
        return raw

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSection:
        if self.own is not None:
            return self
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads is {self.heads}, wanted a multiple of model.kv_heads = {self.kv_heads}")
        if self.latent is not None:
            return self
        if not self.head_size and self.hidden % self.heads:
            raise ValueError(f"model.hidden is {self.hidden}, wanted a multiple of model.heads = {self.heads}")
        if self.head_size % 2:
            raise ValueError(f"model.head_size is {self.head_size}, wanted an even head size (rotary pairs)")
        if not self.head_size and self.hidden // self.heads % 2:
            size = f"{self.hidden} / {self.heads} = {self.hidden // self.heads}"
            raise ValueError(f"model.hidden / model.heads is {size}, wanted an even head size (rotary pairs)")
        return self

    @model_validator(mode="after")
    def _is_of_its_family(self) -> ModelSection:
        if self.own is not None and self.tied:
            raise ValueError("model.tied is true, wanted false for model.own, whose layers share nothing")
        traits = FAMILIES[self.family]
        for name, wanted in (("experts", traits.experts), ("latent", traits.latent)):
            found = getattr(self, name)
            if wanted and found is None:
                raise ValueError(f"model.{name} is null, wanted a mapping for model.family = {self.family}")
            if not wanted and found is not None:
                raise ValueError(f"model.{name} is a mapping, wanted null for model.family = {self.family}")
        if self.experts is not None and self.experts.dense >= self.layers:
            wanted_layers = f"less than model.layers = {self.layers}"
            raise ValueError(f"model.experts.dense is {self.experts.dense}, wanted {wanted_layers}")
        if self.predicted and not traits.latent:
            raise ValueError(f"model.predicted is {self.predicted}, wanted 0 for model.family = {self.family}")
        return self

    @property
    def shape(self) -> ModelShape:
        found = self.model_dump(exclude={"family", "own"})
        parts = {"scaling": RopeScaling, "latent": MLA, "experts": Experts}
        made = {name: part(**found[name]) if found[name] else None for name, part in parts.items()}
        return ModelShape(**{**found, **made}, qk_norm=FAMILIES[self.family].qk_norm)
