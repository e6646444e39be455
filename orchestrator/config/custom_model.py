"""What a run's configuration asks of a model of the user's own."""

from __future__ import annotations

from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelShape

SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")  # with `length`, what a function may take


def shape_of(model: Any, length: int, dtype: str) -> ModelShape:
    """Of a section `model` that names one, for sequences of `length` tokens. Raises PentadError for what cannot be
    trained."""
    import torch  # which takes seconds, and only a model that is made of it needs it here

    from pentad.workers.custom.inspect import look

    sizes = {name: getattr(model, name) for name in SIZES} | {"length": length}
    own = look(model.custom, sizes, getattr(torch, dtype))
    return ModelShape(len(own.layers), model.hidden, 1, 1, 1, model.vocab, custom=own)


def require_plain(text: str, mesh: Mesh, slices: int, *, packed: bool, recompute: str) -> None:
    """Raises PentadError for the first thing asked for that only the families' layers can do."""
    for axis, why in (("tp", "cuts weights"), ("cp", "cuts sequences"), ("ep", "cuts experts")):
        if (found := getattr(mesh, axis)) > 1:
            raise PentadError(f"mesh.{axis} is {found}: expected 1 for model {text}: nothing says how it {why}")
    if slices > 1:
        raise PentadError(f"schedule.slices is {slices}: expected 1 for model {text}, which gets whole sequences")
    if packed:
        raise PentadError(f"data.document_mask is true: expected false for model {text}, which is told of no documents")
    if recompute == "selective":
        raise PentadError(f"memory.recompute is selective: expected none or full for model {text}")


def require_layers(model: ModelShape, stages: int) -> None:
    """Raises PentadError for fewer layers than stages."""
    if model.custom is not None and model.layers < stages:
        found = f"it returns {model.layers} layer{'s' * (model.layers > 1)}"
        expected = f"{stages} pipeline stages (mesh.pp) need at least one each"
        raise PentadError(f"model {model.custom.text}: {found}, but {expected}")
