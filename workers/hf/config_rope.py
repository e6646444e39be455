"""The keys of config.json for rotary embeddings, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from typing import Any

from pentad.schedules.spec.model import RopeScaling
from pentad.workers.hf.config_keys import Keys

_ORIGINAL = "original_max_position_embeddings"


def parse_rope(keys: Keys, *, scales_softmax: bool) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from the `rope_parameters` of transformers 5, or the `rope_theta` and `rope_scaling` of
    transformers 4.

    With `scales_softmax`, YaRN also scales attention scores, which only DeepSeek-V3's attention does.
    """
    rope = _rope_keys(keys, "full_attention")
    rope.require("partial_rotary_factor", 1)
    theta = rope.number("rope_theta", default=keys.read("rope_theta"))
    kind = rope.get("rope_type", "type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.wrong(("rope_type", "type"), kind, "default, linear, llama3 or yarn")
    factor = rope.number("factor")
    # A length beside the mapping is the model's own and takes precedence over one inside it.
    outer = keys if keys.get(_ORIGINAL) else rope
    original = outer.count(_ORIGINAL, default=keys.count("max_position_embeddings", default=2048))
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return theta, RopeScaling("llama3", factor, original, low, high)
    low, high = rope.number("beta_slow", default=1.0), rope.number("beta_fast", default=32.0)
    mscale, mscale_all = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    both = mscale and mscale_all
    default = _mscale(factor, mscale) / _mscale(factor, mscale_all) if both else _mscale(factor, 1.0)
    attention = rope.number("attention_factor", default=default)
    softmax = _mscale(factor, mscale_all) ** 2 if scales_softmax and mscale_all else 1.0
    truncate = rope.flag("truncate", default=True)
    return theta, RopeScaling("yarn", factor, original, low, high, attention, softmax, truncate)


def parse_local_rope(keys: Keys) -> float:
    """The base for layers with sliding windows (Gemma 3), which have no scaling."""
    rope = _rope_keys(keys, "sliding_attention")
    rope.require("rope_type", "default")
    return rope.number("rope_theta", default=keys.read("rope_local_base_freq"))


def _rope_keys(keys: Keys, layer_type: str) -> Keys:
    """The rotary keys for layers of one type; transformers 5 may nest them by type."""
    nested = keys.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get(layer_type), dict):
        return Keys(nested[layer_type], f"rope_parameters.{layer_type}.")
    if layer_type != "full_attention":
        return Keys({})
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    given = keys.get(name) or {}
    if not isinstance(given, dict):
        raise keys.wrong((name,), given, "a mapping")
    return Keys(given, f"{name}.")


def rope_config(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of `parse_rope`, in a spelling that both transformers 4 and 5 read."""
    return {"rope_theta": theta, "rope_scaling": None if scaling is None else _scaling_config(scaling)}


def _scaling_config(scaling: RopeScaling) -> dict[str, Any]:
    low, high = ("low_freq_factor", "high_freq_factor") if scaling.rope_type == "llama3" else ("beta_slow", "beta_fast")
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    config = {
        "rope_type": scaling.rope_type,
        "factor": scaling.factor,
        _ORIGINAL: scaling.original_max_position_embeddings,
        low: scaling.low_freq_factor,
        high: scaling.high_freq_factor,
    }
    if scaling.rope_type == "yarn":
        config |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
    if scaling.softmax_factor != 1.0:
        root = math.sqrt(scaling.softmax_factor)
        config["mscale"] = _mscale_weight(scaling.factor, scaling.attention_factor * root)
        config["mscale_all_dim"] = _mscale_weight(scaling.factor, root)
    return config


def _mscale(factor: float, weight: float) -> float:
    """YaRN's temperature for sequences `factor` times as long (arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _mscale_weight(factor: float, scale: float) -> float:
    """The weight for which `_mscale` gives `scale`; rounded, because config.json has short decimals."""
    return round((scale - 1.0) / (0.1 * math.log(factor)), 12)
