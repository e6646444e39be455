"""Converts between the config.json of Hugging Face models, `ModelSpec`, and the model section of a run's configuration.

A config.json that requires something unsupported is refused with an error that names the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import MAX_LAYERS, MLA, Experts, ModelSpec, RopeScaling
from pentad.workers.hf.config_families import CHECKED, DEFAULTS, FAMILIES, MODEL, OPTIONAL, TRAITS, WRITTEN, Family
from pentad.workers.hf.config_keys import Keys, json_text
from pentad.workers.hf.config_rope import parse_local_rope, parse_rope, rope_config
from pentad.workers.hf.config_window import normal_window, parse_window, window_config

_MAX_EXPERTS = 2**14
_BIAS_UPDATE_RATE = 0.001  # DeepSeek-V3's (arXiv 2412.19437, section 4.2), which config.json lacks
# Fields that config.json lacks or stores in another form: in all families, and in DeepSeek-V3.
_UNWRITTEN = {"head_dim", "mtp_loss_weight", "experts.router_z_loss_coef"}
_UNWRITTEN_WITH_MLA = _UNWRITTEN | {"kv_heads", "experts.aux_loss_coef", "experts.bias_update_rate"}


def parse_config(config: dict[str, Any]) -> tuple[str, ModelSpec]:
    """(family, model) of a config.json, in the spelling of transformers 4 or 5.

    Training options that config.json lacks get their defaults. Raises PentadError naming the key that is missing, wrong
    or not supported.
    """
    name = _family_name(config)
    family = FAMILIES[name]
    keys = Keys(config, defaults={**DEFAULTS, **family.defaults})
    _refuse_unsupported(keys, family)
    model = {field: keys.read(key) for field, key in MODEL.items()} | _parse_optional(keys, family)
    _require_at_most(MAX_LAYERS, num_hidden_layers=model["layers"])
    heads, hidden = model["heads"], model["hidden"]
    if family.mla:
        keys.require("num_key_value_heads", heads)
        model["mla"] = MLA(**{field.name: keys.read(field.name) for field in fields(MLA)})
        model["mtp_layers"] = keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0)
        _require_at_most(MAX_LAYERS, num_nextn_predict_layers=model["mtp_layers"])
    else:
        head_dim = keys.count("head_dim", default=family.defaults.get("head_dim", hidden // heads))
        model["head_dim"] = 0 if head_dim * heads == hidden else head_dim
        if model.get("query_pre_attn_scalar") == head_dim:
            model["query_pre_attn_scalar"] = 0
    model["rope_theta"], model["rope_scaling"] = parse_rope(keys, scales_softmax=family.mla)
    model["sliding_window"], model["layer_types"] = parse_window(keys, family, model["layers"])
    return name, ModelSpec(
        **model,
        **family.traits,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        experts=_parse_experts(keys, family, model["layers"]),
    )


def _require_at_most(limit: int, **found: int) -> None:
    """Raises PentadError for absurd sizes, because all tensors are listed one by one."""
    for key, value in found.items():
        if value > limit:
            raise PentadError(f"{key} is {value}: expected at most {limit}")


def _parse_optional(keys: Keys, family: Family) -> dict[str, Any]:
    """The family's optional fields. Null turns a feature off; a missing key means the default, which may be on."""
    found = {}
    for field, key in family.optional.items():
        found[field] = 0.0 if keys.values.get(key, 0.0) is None else keys.read(key)
    if "rope_local_base_freq" in found:
        found["rope_local_base_freq"] = parse_local_rope(keys)
    return found


def make_config(family: str, model: ModelSpec, *, positions: int, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model for sequences of up to `positions` tokens; `parse_config` is the inverse.

    Raises PentadError for a model that the family's config.json cannot express.
    """
    if family not in FAMILIES:
        raise PentadError(f"model.family is {family}: expected one of {', '.join(FAMILIES)}")
    traits, scaling = FAMILIES[family], model.rope_scaling
    for name, found, expected in (("mla", model.mla, traits.mla), ("experts", model.experts, traits.experts)):
        if (found is not None) != bool(expected):
            raise _inexpressible(family, name, *("null" if not it else "a mapping" for it in (found, expected)))
    if scaling is not None:
        positions = max(positions, round(scaling.factor * scaling.original_max_position_embeddings))
    config: dict[str, Any] = {
        "architectures": [traits.architecture],
        "model_type": traits.model_type,
        **{key: getattr(model, field) for field, key in MODEL.items()},
        **{key: getattr(model, field) or None for field, key in traits.optional.items()},
        "num_key_value_heads": model.heads if traits.mla else model.kv_heads,
        "max_position_embeddings": positions,
        "torch_dtype": dtype,
        **WRITTEN,
        **rope_config(model.rope_theta, scaling),
    }
    if model.experts is not None:
        config |= _experts_config(traits, model.experts, model.layers)
    if traits.layer_types:
        config |= window_config(traits, model)
    if model.mla is not None:
        config |= asdict(model.mla) | {"q_lora_rank": model.mla.q_lora_rank or None, "rope_interleave": True}
        config["num_nextn_predict_layers"] = model.mtp_layers
    else:
        config["head_dim"] = model.qk_head_dim
    if "query_pre_attn_scalar" in traits.optional:
        config["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.qk_head_dim
    config |= traits.fixed
    require_same(family, model, parse_config(config)[1])
    return config


def is_interleaved(config: dict[str, Any]) -> bool:
    """Whether DeepSeek-V3's rotary parts are interleaved in the files of this config.json."""
    return config.get("rope_interleave") is not False


def make_section(family: str, model: ModelSpec) -> dict[str, Any]:
    """The model section of a run's configuration, as plain data, without keys that only other families have."""
    omitted = {*TRAITS, *OPTIONAL} - FAMILIES[family].keys
    given = {"family": family} | {key: value for key, value in asdict(model).items() if key not in omitted}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


def parse_section(section: dict[str, Any]) -> tuple[str, ModelSpec]:
    """The inverse of `make_section`; keys with a default may be missing."""
    values: dict[str, Any] = dict(section)
    if (custom := values.get("custom")) is not None:
        raise PentadError(f"model.custom is {custom}: expected null (only families have Hugging Face files)")
    family = str(values.pop("family", "llama"))
    traits = FAMILIES.get(family, FAMILIES["llama"])
    values |= traits.traits
    try:
        given = values.get("layer_types") or traits.layer_types
        values |= normal_window(values.get("sliding_window", 0), given, values["layers"])._asdict()
        for key, kind in (("rope_scaling", RopeScaling), ("mla", MLA), ("experts", Experts)):
            if values.get(key) is not None:
                values[key] = kind(**values[key])
        return family, ModelSpec(**values)
    except (KeyError, TypeError) as error:
        expected = "expected one that this version of pentad wrote"
        raise PentadError(f"the model section cannot be used ({error}): {expected}") from None


def _family_name(config: dict[str, Any]) -> str:
    model_type, classes = config.get("model_type"), config.get("architectures")
    for name, family in FAMILIES.items():
        if classes == [family.architecture] or (not classes and model_type == family.model_type):
            return name
    key, found = ("architectures", classes) if classes else ("model_type", model_type)
    expected = ", ".join(family.architecture if classes else family.model_type for family in FAMILIES.values())
    raise PentadError(f"config.json has {key} {found!r}: expected one of {expected}")


def _refuse_unsupported(keys: Keys, family: Family) -> None:
    """Raises PentadError for features of the transformers classes that pentad lacks."""
    for key, expected in {**WRITTEN, **CHECKED, **family.fixed}.items():
        keys.require(key, expected)


def _parse_experts(keys: Keys, family: Family, layers: int) -> Experts | None:
    if family.experts is None:
        return None
    values = {field: keys.read(key) for field, key in family.experts.items() if field != "num_experts"}
    names = "n_routed_experts", "num_local_experts", "num_experts"
    values["num_experts"] = keys.count(*names)
    _require_at_most(_MAX_EXPERTS, **{"/".join(names): values["num_experts"]})
    if family.mla:
        shared = keys.count("n_shared_experts", default=1) * values["intermediate_size"]
        values |= {"shared_intermediate_size": shared, "scoring_func": "sigmoid", "bias_update_rate": _BIAS_UPDATE_RATE}
    elif family.model_type == "qwen3_moe":
        values["first_k_dense"] = _first_k_dense(keys, layers)
    experts = Experts(**values)
    return replace(experts, aux_loss_coef=experts.aux_loss_coef / _aux_loss_ratio(experts, layers))


def _experts_config(family: Family, experts: Experts, layers: int) -> dict[str, Any]:
    config = {key: getattr(experts, field) for field, key in (family.experts or {}).items()}
    if "aux_loss_coef" in (family.experts or {}):
        coef = experts.aux_loss_coef * _aux_loss_ratio(experts, layers)
        config["router_aux_loss_coef"] = float(f"{coef:.12g}")  # undoes rounding errors of the product
    config["output_router_logits"] = False
    if family.mla:
        config["n_shared_experts"] = max(1, experts.shared_intermediate_size // experts.intermediate_size)
    elif family.model_type == "qwen3_moe":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(experts.first_k_dense))}
    return config


def _aux_loss_ratio(experts: Experts, layers: int) -> float:
    """The ratio of transformers' `router_aux_loss_coef` to ours for equally strong balancing. Its loss averages over
    the routers of all layers and counts each of a token's top_k visits; pentad's is a sum over layers of means over
    visits."""
    return (layers - experts.first_k_dense) / experts.top_k


def _first_k_dense(keys: Keys, layers: int) -> int:
    """The number of dense layers at the start of a Qwen3-MoE; refuses dense layers elsewhere."""
    step, named = keys.count("decoder_sparse_step", default=1), keys.get("mlp_only_layers") or []
    dense = [layer for layer in range(layers) if layer in named or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        key, found = ("mlp_only_layers", named) if named else ("decoder_sparse_step", step)
        expected = "dense layers at the start only, and at least one layer with experts"
        raise PentadError(f"config.json has {key} {found}: expected {expected}")
    return len(dense)


def require_same(family: str, model: ModelSpec, again: ModelSpec) -> None:
    """Raises PentadError unless `again`, parsed from the config.json of `model`, is the same model."""
    expected = dict(_fields(again))
    for key, found in _fields(model):
        same = math.isclose(found, expected[key], rel_tol=1e-9) if isinstance(found, float) else found == expected[key]
        if not same and key not in (_UNWRITTEN_WITH_MLA if model.mla else _UNWRITTEN):
            raise _inexpressible(family, key, found, expected[key])


def _fields(model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """The fields of a model and of its parts, by their keys in a model section."""
    for name, value in asdict(model).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _inexpressible(family: str, key: str, found: object, expected: object) -> PentadError:
    values = f"{json_text(found)}: expected {json_text(expected)}"
    return PentadError(f"model.{key} is {values} (in the files of family {family})")
