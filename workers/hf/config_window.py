"""The keys of config.json for sliding windows: which layers have one, and how many tokens it spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pentad.schedules.spec.model import LayerType, ModelSpec
from pentad.workers.hf.config_families import FULL, SLIDING, Family
from pentad.workers.hf.config_keys import Keys


class Window(NamedTuple):
    """The fields of `ModelSpec` for sliding windows."""

    sliding_window: int
    layer_types: tuple[LayerType, ...]


def normal_window(sliding_window: int, layer_types: Sequence[LayerType], layers: int) -> Window:
    """The window in normal form: the shortest repeating pattern of layer types, and size 0 if no layer has a window."""
    types = [layer_types[layer % len(layer_types)] if layer_types else FULL for layer in range(layers)]
    if not sliding_window or SLIDING not in types:
        return Window(0, (FULL,))
    period = next(n for n in range(1, layers + 1) if all(types[i] == types[i % n] for i in range(layers)))
    return Window(sliding_window, tuple(types[:period]))


def parse_window(keys: Keys, family: Family, layers: int) -> Window:
    """The window of a model with this many layers. Raises PentadError for windows that its family does not have."""
    types = keys.get("layer_types")
    is_list = isinstance(types, list) and all(each in (FULL, SLIDING) for each in types)
    if types is not None and (not is_list or len(types) != layers):
        raise keys.wrong(("layer_types",), types, f"{layers} times {FULL} or {SLIDING}")
    if not family.layer_types:
        if SLIDING in (types or ()):
            raise keys.wrong(("layer_types",), types, f"{FULL} only")
        keys.require("use_sliding_window", False)
        return Window(0, (FULL,))
    window = keys.count("sliding_window", default=0)
    if "sliding_window" not in keys.values:  # null means none
        window = family.defaults.get("sliding_window", 0)
    if _has_flag(family) and not keys.flag("use_sliding_window", default=False):
        window = 0
    return normal_window(window, types or _default_types(keys, family, layers), layers)


def window_config(family: Family, model: ModelSpec) -> dict[str, Any]:
    """The inverse of `parse_window`."""
    config: dict[str, Any] = {"sliding_window": model.sliding_window or None}
    if _has_flag(family):
        config["use_sliding_window"] = model.sliding_window > 0
    elif family.layer_types == (SLIDING,):  # windows in all layers; there is no key for layer types
        return config
    if model.sliding_window or not _has_flag(family):
        types = [model.layer_types[layer % len(model.layer_types)] for layer in range(model.layers)]
        config["layer_types"] = types
        if _has_flag(family):
            config["max_window_layers"] = types.index(SLIDING)
    return config


def _has_flag(family: Family) -> bool:
    """Whether the family's windows are used only with a flag, as in Qwen's files."""
    return family.model_type in ("qwen2", "qwen3")


def _default_types(keys: Keys, family: Family, layers: int) -> tuple[LayerType, ...]:
    if _has_flag(family):
        full = min(layers, keys.count("max_window_layers", default=28))
        return (FULL,) * full + (SLIDING,) * (layers - full)
    if "sliding_window_pattern" in keys.values:
        return (SLIDING,) * (keys.count("sliding_window_pattern") - 1) + (FULL,)
    return family.layer_types
