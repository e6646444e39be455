"""Converts between config.json of Hugging Face models, `ModelSpec`, and the model section of a run's configuration.

A config.json that asks for anything pentad cannot do is refused with an error that names the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import MLA, Experts, ModelSpec, RopeScaling
from pentad.workers.hf.config_keys import Keys, json_text
from pentad.workers.hf.config_moe import experts_config, experts_requirements, parse_experts
from pentad.workers.hf.config_rope import parse_rope, rope_config

# model.family -> model_type and class in transformers
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}
_WITH_QK_NORM = ("qwen3", "qwen3-moe")
_WITH_EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3")
_MLA_NORM_EPS = 1e-6  # of the norms inside DeepSeek-V3's attention, whatever rms_norm_eps is


def parse_config(config: dict[str, Any]) -> tuple[str, ModelSpec]:
    """(family, model) of a config.json, in the spelling of transformers 4 or 5.

    Training options that config.json lacks get their defaults. Raises PentadError, which names the key that is missing,
    wrong or not supported.
    """
    family = _family(config)
    keys = Keys(config)
    _refuse_unsupported(keys, family)
    mla = _parse_mla(keys) if family == "deepseek-v3" else None
    heads, hidden, layers = (keys.count(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    head_dim = 0 if mla else keys.count("head_dim", default=128 if family == "qwen3" else hidden // heads)
    theta, scaling = parse_rope(keys, 1e6 if family == "mixtral" else 1e4, scales_softmax=mla is not None)
    return family, ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        ffn=keys.count("intermediate_size"),
        vocab=keys.count("vocab_size"),
        rope_theta=theta,
        norm_eps=keys.number("rms_norm_eps", default=1e-5 if family == "mixtral" else 1e-6),
        head_dim=0 if head_dim * heads == hidden else head_dim,
        qk_norm=family in _WITH_QK_NORM,
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
        rope_scaling=scaling,
        mla=mla,
        experts=parse_experts(keys, family, layers),
        mtp_layers=keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0) if mla else 0,
    )


def make_config(family: str, model: ModelSpec, *, positions: int, dtype: str = "float32") -> dict[str, Any]:
    """config.json of a model for sequences of up to `positions` tokens; `parse_config` is the inverse.

    Raises PentadError for a model that the family's config.json cannot express.
    """
    if family not in FAMILIES:
        raise PentadError(f"model.family is {family}: expected one of {', '.join(FAMILIES)}")
    for key, found, expected in _requirements(family, model):
        if found != expected:
            values = f"{json_text(found)}: expected {json_text(expected)}"
            raise PentadError(f"model.{key} is {values} (in the files of family {family})")
    scaling = model.rope_scaling
    if scaling is not None:
        positions = max(positions, round(scaling.factor * scaling.original_max_position_embeddings))
    model_type, architecture = FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": dtype,
        **rope_config(model.rope_theta, scaling),
        **experts_config(family, model.experts),
    }
    if family in _WITH_QK_NORM:
        config |= {"use_sliding_window": False, "sliding_window": None}
    if model.mla is None:
        return config | {"head_dim": model.qk_head_dim}
    mla = asdict(model.mla) | {"q_lora_rank": model.mla.q_lora_rank or None}
    return config | mla | {"rope_interleave": True, "num_nextn_predict_layers": model.mtp_layers}


def make_section(family: str, model: ModelSpec) -> dict[str, Any]:
    """The model section of a run's configuration, as plain data."""
    return {"family": family, **{key: value for key, value in asdict(model).items() if key != "qk_norm"}}


def parse_section(section: dict[str, Any]) -> tuple[str, ModelSpec]:
    """The inverse of `make_section`; keys with a default may be missing."""
    values: dict[str, Any] = dict(section)
    if (custom := values.get("custom")) is not None:
        raise PentadError(f"model.custom is {custom}: expected null (only families have Hugging Face files)")
    family = str(values.pop("family", "llama"))
    values["qk_norm"] = family in _WITH_QK_NORM
    try:
        for key, kind in (("rope_scaling", RopeScaling), ("mla", MLA), ("experts", Experts)):
            if values.get(key) is not None:
                values[key] = kind(**values[key])
        return family, ModelSpec(**values)
    except TypeError as error:
        expected = "expected one that this version of pentad wrote"
        raise PentadError(f"the model section cannot be used ({error}): {expected}") from None


def _family(config: dict[str, Any]) -> str:
    model_type, classes = config.get("model_type"), config.get("architectures")
    for family, (known_type, known_class) in FAMILIES.items():
        if classes == [known_class] or (not classes and model_type == known_type):
            return family
    key, found = ("architectures", classes) if classes else ("model_type", model_type)
    expected = ", ".join(names[1 if classes else 0] for names in FAMILIES.values())
    raise PentadError(f"config.json has {key} {found!r}: expected one of {expected}")


def _refuse_unsupported(keys: Keys, family: str) -> None:
    """Raises PentadError for features of these transformers classes that pentad does not have."""
    required: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1}
    required |= dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False)
    required |= dict.fromkeys(("attention_dropout", "router_jitter_noise"), 0)
    if family == "mixtral":
        required["sliding_window"] = None
    if family == "deepseek-v3":
        required |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        required["rms_norm_eps"] = _MLA_NORM_EPS
    for key, expected in required.items():
        keys.require(key, expected)
    for kind in keys.get("layer_types") or ():
        if kind != "full_attention":
            raise PentadError(f"config.json has {kind} in layer_types: expected full_attention only")


def _requirements(family: str, model: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """(key of the model section, its value, the value that the family's config.json can express)."""
    has_mla, scaling = family == "deepseek-v3", model.rope_scaling
    yield "qk_norm", model.qk_norm, family in _WITH_QK_NORM
    for key, value, expected in (
        ("mla", model.mla, has_mla),
        ("experts", model.experts, family in _WITH_EXPERTS),
    ):
        yield key, "null" if value is None else "a mapping", "a mapping" if expected else "null"
    yield ("norm_eps", model.norm_eps, _MLA_NORM_EPS) if has_mla else ("mtp_layers", model.mtp_layers, 0)
    if scaling is not None and not has_mla:
        yield "rope_scaling.softmax_factor", scaling.softmax_factor, 1.0
    if scaling is not None and scaling.rope_type == "llama3":
        yield "rope_scaling.attention_factor", scaling.attention_factor, 1.0
    if model.experts is not None:
        yield from experts_requirements(family, model, model.experts)


def _parse_mla(keys: Keys) -> MLA:
    keys.require("num_key_value_heads", keys.count("num_attention_heads"))
    return MLA(
        kv_lora_rank=keys.count("kv_lora_rank"),
        q_lora_rank=keys.count("q_lora_rank", default=0),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )
