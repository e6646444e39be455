"""Experts in config.json of the families that have them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import Experts, ModelShape
from pentad.workers.hf.hf_keys import Keys

# How far a step moves an expert's bias towards an even load in DeepSeek-V3 (arXiv 2412.19437, 4.2); files do not say.
BIAS_RATE = 0.001
KEYS = tuple(field.name for field in fields(Experts))


def experts_of(keys: Keys, family: str, layers: int) -> Experts | None:
    """None in families without."""
    if family in ("llama", "qwen3"):
        return None
    count = keys.count("n_routed_experts", "num_local_experts", "num_experts")
    active = keys.count("num_experts_per_tok", default=8 if family == "qwen3-moe" else 2)
    auxiliary = keys.number("router_aux_loss_coef", default=0.001)
    if family == "mixtral":
        return Experts(count, active, keys.count("intermediate_size"), aux_loss_coef=auxiliary)
    ffn = keys.count("moe_intermediate_size")
    if family == "qwen3-moe":
        normalized, dense = keys.flag("norm_topk_prob", default=False), _dense_first(keys, layers)
        return Experts(count, active, ffn, norm_topk_prob=normalized, aux_loss_coef=auxiliary, first_k_dense=dense)
    return Experts(
        count,
        active,
        ffn,
        shared_intermediate_size=keys.count("n_shared_experts", default=1) * ffn,
        scoring_func="sigmoid",
        norm_topk_prob=keys.flag("norm_topk_prob", default=True),
        routed_scaling_factor=keys.number("routed_scaling_factor", default=2.5),
        num_groups=keys.count("n_group", default=1),
        topk_groups=keys.count("topk_group", default=1),
        bias_update_rate=BIAS_RATE,
        first_k_dense=keys.count("first_k_dense_replace", default=0),
    )


def experts_keys(family: str, shape: ModelShape) -> dict[str, Any]:
    """The inverse of `experts_of`, but for what only training needs."""
    experts = shape.experts
    if experts is None:
        return {}
    common = {"num_experts_per_tok": experts.top_k, "output_router_logits": False}
    if family == "mixtral":
        alone = {"num_local_experts": experts.num_experts, "sliding_window": None}
        return {**common, **alone, "router_aux_loss_coef": experts.aux_loss_coef}
    common |= {"moe_intermediate_size": experts.intermediate_size, "norm_topk_prob": experts.norm_topk_prob}
    if family == "qwen3-moe":
        dense = {"decoder_sparse_step": 1, "mlp_only_layers": list(range(experts.first_k_dense))}
        return {**common, **dense, "num_experts": experts.num_experts, "router_aux_loss_coef": experts.aux_loss_coef}
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


def expected_of_experts(family: str, shape: ModelShape, experts: Experts) -> list[tuple[str, Any, Any]]:
    """(field, what it is, what the family's files can hold) of all that they could get wrong."""
    if family == "deepseek-v3":
        whole = max(1, experts.shared_intermediate_size // experts.intermediate_size) * experts.intermediate_size
        return [
            ("experts.score", experts.scoring_func, "sigmoid"),
            ("experts.shared", experts.shared_intermediate_size, whole),
        ]
    plain = Experts(experts.num_experts, experts.top_k, experts.intermediate_size, aux_loss_coef=experts.aux_loss_coef)
    free: dict[str, Any] = (
        {"dense": experts.first_k_dense, "normalized": experts.norm_topk_prob} if family == "qwen3-moe" else {}
    )
    right = replace(plain, **free)
    ffn = [] if family == "qwen3-moe" else [("ffn", shape.ffn, experts.intermediate_size)]
    return [*ffn, *((f"experts.{key}", getattr(experts, key), getattr(right, key)) for key in KEYS)]


def _dense_first(keys: Keys, layers: int) -> int:
    """How many layers without experts a Qwen3-MoE begins with; any elsewhere are refused."""
    step, named = keys.count("decoder_sparse_step", default=1), keys.get("mlp_only_layers") or []
    dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        key, found = ("mlp_only_layers", named) if named else ("decoder_sparse_step", step)
        expected = "expected layers without experts at the beginning only, and some with"
        raise PentadError(f"config.json has {key} {found}, {expected}")
    return len(dense)
