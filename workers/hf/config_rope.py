"""The rotary embedding in config.json: its base, and a scaling of wavelengths, in old and new spellings."""

from __future__ import annotations

import math
from typing import Any

from pentad.schedules.spec.model import RopeScaling
from pentad.workers.hf.hf_keys import Keys

_ORIGINAL = "original_max_position_embeddings"


def rope_of(keys: Keys, theta: float, *, softmax: bool) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of `rope_parameters` (transformers 5) or of `rope_theta` and `rope_scaling` (before), `theta`
    where neither says it. Only with `softmax` does YaRN scale the scores too, as DeepSeek-V3's attention does.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    given = keys.get(name) or {}
    if not isinstance(given, dict):
        raise keys.wrong((name,), given, "a mapping")
    inner = Keys(given, f"{name}.")
    inner.require("partial_rotary_factor", 1)
    base = inner.number("rope_theta", default=keys.number("rope_theta", default=theta))
    kind = inner.get("rope_type", "type") or "default"
    if kind == "default":
        return base, None
    if kind not in ("llama3", "yarn"):
        raise inner.wrong(("rope_type", "type"), kind, "default, llama3 or yarn")
    factor = inner.number("factor")
    # A length beside the mapping is the model's own, and comes before one inside it.
    nearest = keys if keys.get(_ORIGINAL) else inner
    original = nearest.count(_ORIGINAL, default=keys.count("max_position_embeddings", default=2048))
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        return base, RopeScaling("llama3", factor, original, low, high)
    inner.require("truncate", True)
    low, high = inner.number("beta_slow", default=1.0), inner.number("beta_fast", default=32.0)
    some, all_of_it = inner.number("mscale", default=0.0), inner.number("mscale_all_dim", default=0.0)
    usual = _mscale(factor, some) / _mscale(factor, all_of_it) if some and all_of_it else _mscale(factor, 1.0)
    scores = _mscale(factor, all_of_it) ** 2 if softmax and all_of_it else 1.0
    return base, RopeScaling(
        "yarn", factor, original, low, high, inner.number("attention_factor", default=usual), scores
    )


def rope_keys(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The spelling that both transformers 4 and 5 read."""
    return {"rope_theta": theta, "rope_scaling": None if scaling is None else _scaling_keys(scaling)}


def _scaling_keys(scaling: RopeScaling) -> dict[str, Any]:
    common = {
        "rope_type": scaling.rope_type,
        "factor": scaling.factor,
        _ORIGINAL: scaling.original_max_position_embeddings,
    }
    if scaling.rope_type == "llama3":
        return {**common, "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    yarn = {
        **common,
        "beta_slow": scaling.low_freq_factor,
        "beta_fast": scaling.high_freq_factor,
        "attention_factor": scaling.attention_factor,
    }
    if scaling.softmax_factor == 1.0:
        return yarn
    root = math.sqrt(scaling.softmax_factor)
    return {
        **yarn,
        "mscale": _solved(scaling.factor, scaling.attention_factor * root),
        "mscale_all_dim": _solved(scaling.factor, root),
    }


def _mscale(factor: float, weight: float) -> float:
    """What attention is scaled by for texts `factor` times as long (arXiv 2309.00071, 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _solved(factor: float, scale: float) -> float:
    """The weight with which `_mscale` gives `scale`; rounded, since it was a short decimal once."""
    return round((scale - 1.0) / (0.1 * math.log(factor)), 12)
