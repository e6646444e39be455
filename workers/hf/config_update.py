"""The config.json of an imported model after training: what training did not change stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.hf.config import make_config, parse_config, require_same
from pentad.workers.hf.config_rope import rope_config

DEFAULT_POSITIONS = 2048  # the default of Llama's class in transformers
_POSITIONS = "max_position_embeddings"
_ROPE = {"rope_theta", "rope_scaling"}
# Names of the same key in different releases of transformers or families.
_SPELLINGS = (
    ("torch_dtype", "dtype"),
    ("n_routed_experts", "num_local_experts", "num_experts"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)


def update_config(
    original: dict[str, Any], family: str, model: ModelSpec, *, positions: int, dtype: str
) -> dict[str, Any]:
    """`original` with the dtype of the files, with more positions if training used more, and with the keys in which
    `model` differs from it, but without quantization.

    It still names MTP layers that the files lack, as transformers does. Raises PentadError for a model that the
    family's config.json cannot express, or of another family.
    """
    known, imported = parse_config(original)
    if known != family:
        raise PentadError(f"model.family is {family}: expected {known}, the family of the import")
    if not model.mtp_layers:
        imported = replace(imported, mtp_layers=0)
    known_positions = original.get(_POSITIONS) or DEFAULT_POSITIONS
    positions = max(positions, known_positions)
    before, made = (make_config(family, each, positions=positions, dtype=dtype) for each in (imported, model))
    config = {key: value for key, value in original.items() if key != "quantization_config"}
    for key in made:
        if key not in _ROPE | {_POSITIONS} and (made[key] != before[key] or key == "torch_dtype"):
            config |= dict.fromkeys(_spellings(key, original), made[key])
    if model.rope_scaling != imported.rope_scaling:
        positions = max(positions, made[_POSITIONS])
    if positions > known_positions:
        config[_POSITIONS] = positions
    parsed = _parse(config, model)
    if (parsed.rope_theta, parsed.rope_scaling) != (model.rope_theta, model.rope_scaling):
        config |= _rope_keys(original, model)
    require_same(family, model, _parse(config, model))
    return config


def _parse(config: dict[str, Any], model: ModelSpec) -> ModelSpec:
    parsed = parse_config(config)[1]
    return parsed if model.mtp_layers else replace(parsed, mtp_layers=0)


def _spellings(key: str, original: dict[str, Any]) -> list[str]:
    """The names under which `original` has the key, or the key itself."""
    names = next((names for names in _SPELLINGS if key in names), (key,))
    return [name for name in names if name in original] or [key]


def _rope_keys(original: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """The rotary keys of `model` in the spelling of `original`."""
    made = rope_config(model.rope_theta, model.rope_scaling)
    if "rope_parameters" not in original:
        return made
    return {"rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default", **(made["rope_scaling"] or {})}}
