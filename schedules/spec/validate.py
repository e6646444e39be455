"""Whether a model and its batch can be cut as a mesh asks: every mistake in one sentence with its numbers."""

from __future__ import annotations

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.cp_layout import CpMethod, check_context
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelShape


def require_fit(
    model: ModelShape, mesh: Mesh, length: int, rows: int, slices: int = 1, context: CpMethod = "ring"
) -> None:
    """Raises PentadError for the first part of the model that an axis does not divide.

    `rows` sequences of `length` tokens are in a microbatch, each in so many `slices`; `context` is how context ranks
    attend to each other's tokens.
    """
    _require_tensor(model, mesh)
    _require_context(model, mesh, length, slices, context)
    _require_experts(model, mesh)
    tokens = rows * length // slices // mesh.cp
    if tokens % mesh.tp:
        shared = f"{rows} x {length} / {slices * mesh.cp}" if slices * mesh.cp > 1 else f"{rows} x {length}"
        why = f"the tokens of a microbatch, {shared} = {tokens}, which tensor ranks share out"
        raise PentadError(f"mesh.tp is {mesh.tp}: expected a divisor of {why}")


def _require_tensor(model: ModelShape, mesh: Mesh) -> None:
    sizes = {"heads": model.heads, "ffn": model.ffn, "vocab": model.vocab}
    if model.experts is not None:
        sizes |= {
            "experts.ffn": model.experts.intermediate_size,
            "experts.shared": model.experts.shared_intermediate_size,
        }
    for name, size in sizes.items():
        if size % mesh.tp:
            raise PentadError(f"model.{name} is {size}: expected a multiple of mesh.tp = {mesh.tp}")
    if model.mla is None and model.kv_heads % mesh.tp and mesh.tp % model.kv_heads:
        expected = f"a multiple or a divisor of mesh.tp = {mesh.tp}"
        raise PentadError(f"model.kv_heads is {model.kv_heads}: expected {expected}")


def _require_context(model: ModelShape, mesh: Mesh, length: int, slices: int, context: CpMethod) -> None:
    if mesh.cp == 1:
        return
    if slices > 1:
        raise PentadError(f"mesh.cp is {mesh.cp}: expected 1 where a schedule cuts sequences into {slices} slices")
    check_context(length, model.heads, model.kv_heads, mesh.cp, context, mesh.tp)


def _require_experts(model: ModelShape, mesh: Mesh) -> None:
    if model.experts is None:
        if mesh.ep > 1:
            raise PentadError(f"mesh.ep is {mesh.ep}: expected 1 for a model without experts")
    elif model.experts.num_experts % mesh.ep:
        raise PentadError(
            f"model.experts.num_experts is {model.experts.num_experts}: expected a multiple of mesh.ep = {mesh.ep}"
        )
