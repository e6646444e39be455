"""The lora section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, PositiveFloat, field_validator

from pentad.orchestrator.config.errors import Broken, shown
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.sections import Count, Section, Text
from pentad.schedules.spec.lora import LoraSpec, targets_of

ALL_LINEAR = "all-linear"
FUSED_FAMILIES = ("phi3",)


class LoraSection(Section):
    """Low-rank adapters, trained beside the frozen weights of run.init_from (docs/fine-tuning.md)."""

    rank: Count | None = None
    """rank of the adapters; null: all parameters are trained, without adapters"""
    alpha: PositiveFloat = 16.0
    """the output of the adapters is multiplied by alpha / rank"""
    targets: list[Text] = Field(default=["q_proj", "k_proj", "v_proj", "o_proj"])
    """what gets adapters, by the names of PEFT: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; of phi3
    qkv_proj, o_proj, gate_up_proj, down_proj; of deepseek-v3's attention q_a_proj, q_b_proj, kv_a_proj_with_mqa,
    kv_b_proj, o_proj; of experts experts.gate_up_proj, experts.down_proj; all-linear: all of the model's"""

    init_from: Text | None = None
    """folder of an adapter of PEFT that training continues; null: A begins with random values and B with zeros"""

    @field_validator("targets", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return [ALL_LINEAR] if value == ALL_LINEAR else value

    def rules(self) -> Iterator[Broken | str]:
        if self.rank is None and self.init_from is not None:
            yield Broken("init_from", "null without lora.rank")
        if not self.targets:
            yield Broken("targets", "at least one module")
        if len(set(self.targets)) < len(self.targets):
            yield Broken("targets", "each module once")

    def model_rules(self, model: ModelSection) -> Iterator[str]:
        """Every target must be a module of the model that can have an adapter."""
        if self.rank is None:
            return
        found, spec = f"lora.rank is {self.rank}: expected null", model.spec if model.custom is None else None
        if spec is None:
            yield f"{found} for model {model.custom}, whose modules are its own"
        elif spec.mtp_layers:
            yield f"model.mtp_layers is {spec.mtp_layers}: expected 0 with lora.rank, which leaves these layers out"
        elif spec.experts is not None and spec.experts.bias_update_rate:
            rate = spec.experts.bias_update_rate
            yield f"model.experts.bias_update_rate is {rate:g}: expected 0 with lora.rank, which keeps routing biases"
        else:
            known = self._known(model)
            if unknown := [each for each in self._modules(model) if each not in known]:
                yield f"lora.targets has {', '.join(map(shown, unknown))}: expected some of {', '.join(known)}"

    def spec(self, model: ModelSection) -> LoraSpec | None:
        """The adapters, without the checkpoint that holds the frozen weights."""
        return None if self.rank is None else LoraSpec(self.rank, self.alpha, self._modules(model))

    def _modules(self, model: ModelSection) -> tuple[str, ...]:
        return self._known(model) if self.targets == [ALL_LINEAR] else tuple(self.targets)

    def _known(self, model: ModelSection) -> tuple[str, ...]:
        return targets_of(model.spec, fused=model.family in FUSED_FAMILIES)
