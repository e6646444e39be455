"""The keys of config.json that describe experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.workers.hf.config_keys import Keys

BIAS_UPDATE_RATE = 0.001  # of DeepSeek-V3 (arXiv 2412.19437, section 4.2); config.json does not have it


def parse_experts(keys: Keys, family: str, layers: int) -> Experts | None:
    """The experts of a model of `layers` layers; None for families without."""
    if family in ("llama", "qwen3"):
        return None
    count = keys.count("n_routed_experts", "num_local_experts", "num_experts")
    top_k = keys.count("num_experts_per_tok", default=8 if family == "qwen3-moe" else 2)
    if family == "deepseek-v3":
        width = keys.count("moe_intermediate_size")
        return Experts(
            count,
            top_k,
            width,
            shared_intermediate_size=keys.count("n_shared_experts", default=1) * width,
            scoring_func="sigmoid",
            norm_topk_prob=keys.flag("norm_topk_prob", default=True),
            routed_scaling_factor=keys.number("routed_scaling_factor", default=2.5),
            num_groups=keys.count("n_group", default=1),
            topk_groups=keys.count("topk_group", default=1),
            bias_update_rate=BIAS_UPDATE_RATE,
            first_k_dense=keys.count("first_k_dense_replace", default=0),
        )
    coef = keys.number("router_aux_loss_coef", default=0.001)
    if family == "mixtral":
        return Experts(count, top_k, keys.count("intermediate_size"), aux_loss_coef=coef)
    return Experts(
        count,
        top_k,
        keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", default=False),
        aux_loss_coef=coef,
        first_k_dense=_first_k_dense(keys, layers),
    )


def experts_config(family: str, experts: Experts | None) -> dict[str, Any]:
    """The inverse of `parse_experts`, except for `bias_update_rate` and DeepSeek-V3's `aux_loss_coef`."""
    if experts is None:
        return {}
    common: dict[str, Any] = {"num_experts_per_tok": experts.top_k, "output_router_logits": False}
    if family != "deepseek-v3":
        common["router_aux_loss_coef"] = experts.aux_loss_coef
    if family == "mixtral":
        return {**common, "num_local_experts": experts.num_experts, "sliding_window": None}
    common |= {"moe_intermediate_size": experts.intermediate_size, "norm_topk_prob": experts.norm_topk_prob}
    if family == "qwen3-moe":
        dense = {"decoder_sparse_step": 1, "mlp_only_layers": list(range(experts.first_k_dense))}
        return {**common, **dense, "num_experts": experts.num_experts}
    return {
        **common,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "routed_scaling_factor": experts.routed_scaling_factor,
        "n_group": experts.num_groups,
        "topk_group": experts.topk_groups,
        "first_k_dense_replace": experts.first_k_dense,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


def experts_requirements(family: str, model: ModelSpec, experts: Experts) -> Iterator[tuple[str, Any, Any]]:
    """(key of the model section, its value, the value that the family's config.json can express)."""
    if family == "deepseek-v3":
        multiple = max(1, experts.shared_intermediate_size // experts.intermediate_size)
        yield "experts.scoring_func", experts.scoring_func, "sigmoid"
        shared = experts.shared_intermediate_size
        yield "experts.shared_intermediate_size", shared, multiple * experts.intermediate_size
        return
    expected = Experts(
        experts.num_experts, experts.top_k, experts.intermediate_size, aux_loss_coef=experts.aux_loss_coef
    )
    if family == "qwen3-moe":
        expected = replace(expected, first_k_dense=experts.first_k_dense, norm_topk_prob=experts.norm_topk_prob)
    else:
        yield "ffn", model.ffn, experts.intermediate_size
    for field in fields(Experts):
        yield f"experts.{field.name}", getattr(experts, field.name), getattr(expected, field.name)


def _first_k_dense(keys: Keys, layers: int) -> int:
    """The number of dense layers at the start of a Qwen3-MoE; refuses dense layers elsewhere."""
    step, named = keys.count("decoder_sparse_step", default=1), keys.get("mlp_only_layers") or []
    dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        key, found = ("mlp_only_layers", named) if named else ("decoder_sparse_step", step)
        expected = "dense layers at the start only, and at least one layer with experts"
        raise PentadError(f"config.json has {key} {found}: expected {expected}")
    return len(dense)
