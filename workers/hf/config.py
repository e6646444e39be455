"""config.json of Hugging Face models <-> `ModelShape`, for the families that pentad knows.

Whatever a config asks that pentad does not do is refused in one sentence that names the key.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import MLA, Experts, ModelShape, RopeScaling
from pentad.workers.hf.config_moe import expected_of_experts, experts_keys, experts_of
from pentad.workers.hf.config_rope import rope_keys, rope_of
from pentad.workers.hf.hf_keys import Keys

# Family -> what transformers calls it, and its class.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}
LATENT_EPS = 1e-6  # of the norms inside DeepSeek-V3's attention, whatever rms_norm_eps is
_QK_NORMED = ("qwen3", "qwen3-moe")


def family_of(config: dict[str, Any]) -> str:
    """The family that config.json names; PentadError for one that pentad does not know."""
    kind, classes = config.get("model_type"), config.get("architectures")
    for family, (its_kind, its_class) in FAMILIES.items():
        if classes == [its_class] or (not classes and kind == its_kind):
            return family
    key, found = ("architectures", classes) if classes else ("model_type", kind)
    expected = ", ".join(its[0 if key == "model_type" else 1] for its in FAMILIES.values())
    raise PentadError(f"config.json has {key} {found!r}: expected one of {expected}")


def shape_of(config: dict[str, Any]) -> tuple[str, ModelShape]:
    """Family and sizes that config.json states, in the spelling of transformers 4 or 5.

    What only training needs and files do not say is as in `Experts` and `ModelShape`; a bias of experts moves by
    BIAS_RATE. PentadError names the key that is missing, wrong or beyond pentad.
    """
    family = family_of(config)
    keys = Keys(config)
    _refuse_foreign(keys, family)
    latent = _latent(keys) if family == "deepseek-v3" else None
    heads = keys.count("num_attention_heads")
    hidden, layers = keys.count("hidden_size"), keys.count("num_hidden_layers")
    size = 0 if latent else keys.count("head_dim", default=128 if family == "qwen3" else hidden // heads)
    theta, scaling = rope_of(keys, 1e6 if family == "mixtral" else 1e4, softmax=latent is not None)
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        ffn=keys.count("intermediate_size"),
        vocab=keys.count("vocab_size"),
        rope_theta=theta,
        norm_eps=keys.number("rms_norm_eps", default=1e-5 if family == "mixtral" else 1e-6),
        head_dim=0 if size * heads == hidden else size,
        qk_norm=family in _QK_NORMED,
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
        rope_scaling=scaling,
        mla=latent,
        experts=experts_of(keys, family, layers),
        mtp_layers=_predicted(keys) if latent else 0,
    )
    require_fit(family, shape, "config.json")
    return family, shape


def config_of(family: str, shape: ModelShape, *, positions: int, dtype: str = "float32") -> dict[str, Any]:
    """config.json for a model whose sequences have up to `positions` tokens; PentadError where `shape` has what the
    family's files cannot say. `shape_of` reads it back, but for what only training needs."""
    require_fit(family, shape, "model")
    kind, its_class = FAMILIES[family]
    scaling = shape.rope_scaling
    reach = (
        positions
        if scaling is None
        else max(positions, round(scaling.factor * scaling.original_max_position_embeddings))
    )
    config: dict[str, Any] = {
        "architectures": [its_class],
        "model_type": kind,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": reach,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": dtype,
        **rope_keys(shape.rope_theta, shape.rope_scaling),
    }
    if shape.mla is None:
        config["head_dim"] = shape.qk_head_dim
    if family in _QK_NORMED:
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config | _latent_keys(shape) | experts_keys(family, shape)


def section_of(family: str, shape: ModelShape) -> dict[str, Any]:
    """The model section of a run's configuration: plain values, with nested ones as mappings or None."""
    return {"family": family, **{key: value for key, value in asdict(shape).items() if key != "qk_norm"}}


def of_section(section: dict[str, Any]) -> tuple[str, ModelShape]:
    """The inverse of `section_of`; keys may be missing that have a default."""
    made: dict[str, Any] = dict(section)
    if (own := made.pop("own", None)) is not None:
        raise PentadError(
            f"model.custom is {own}: expected null: only models of the families go to Hugging Face's files"
        )
    family = str(made.pop("family", "llama"))
    made["qk_norm"] = family in _QK_NORMED
    try:
        for key, kind in (("scaling", RopeScaling), ("latent", MLA), ("experts", Experts)):
            if made.get(key) is not None:
                made[key] = kind(**made[key])
        return family, ModelShape(**made)
    except TypeError as error:
        raise PentadError(
            f"the model section is no section of pentad ({error}): expected one as it writes it"
        ) from None


def require_fit(family: str, shape: ModelShape, where: str) -> None:
    """PentadError unless the family's files can hold a model of this shape; `where` the mistake would be."""
    if family not in FAMILIES:
        raise PentadError(f"{where}.family is {family}: expected one of {', '.join(FAMILIES)}")
    deep, expert = family == "deepseek-v3", shape.experts
    expected: list[tuple[str, Any, Any]] = [
        ("qk_norm", shape.qk_norm, family in _QK_NORMED),
        ("latent", shape.mla is not None, deep),
        ("experts", expert is not None, deep or family in ("mixtral", "qwen3-moe")),
    ]
    expected += [("predicted", shape.mtp_layers, 0)] if not deep else [("norm_eps", shape.norm_eps, LATENT_EPS)]
    if shape.rope_scaling is not None and not deep:
        expected.append(("scaling.softmax", shape.rope_scaling.softmax_factor, 1.0))
    if shape.rope_scaling is not None and shape.rope_scaling.rope_type == "llama3":
        expected.append(("scaling.attention", shape.rope_scaling.attention_factor, 1.0))
    if expert is not None:
        expected += expected_of_experts(family, shape, expert)
    for key, found, right in expected:
        if found != right:
            raise PentadError(f"{where} has {key} {_shown(found)}, but files of {family} want {_shown(right)}")


def _refuse_foreign(keys: Keys, family: str) -> None:
    """What these classes of transformers can do and pentad cannot, and what other code does by the same key."""
    keys.require("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        keys.require(key, False)
    for key in ("attention_dropout", "router_jitter_noise"):
        keys.require(key, 0)
    keys.require("partial_rotary_factor", 1)
    if family == "mixtral":
        keys.require("sliding_window", None)
    for kind in keys.get("layer_types") or ():
        if kind != "full_attention":
            raise PentadError(f"config.json has {kind} in layer_types: expected full_attention only")
    if family == "deepseek-v3":
        fixed = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rms_norm_eps": LATENT_EPS}
        for key, right in fixed.items():
            keys.require(key, right)


def _latent(keys: Keys) -> MLA:
    keys.require("num_key_value_heads", keys.count("num_attention_heads"))
    return MLA(
        kv_lora_rank=keys.count("kv_lora_rank"),
        q_lora_rank=keys.count("q_lora_rank", default=0),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def _latent_keys(shape: ModelShape) -> dict[str, Any]:
    latent = shape.mla
    if latent is None:
        return {}
    return {
        "kv_lora_rank": latent.kv_lora_rank,
        "q_lora_rank": latent.q_lora_rank or None,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": True,
        "num_nextn_predict_layers": shape.mtp_layers,
    }


def _predicted(keys: Keys) -> int:
    return keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0)


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
