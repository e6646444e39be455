"""Checks that the axes of a mesh divide a model and its batch; each mistake is one sentence with its numbers."""

from __future__ import annotations

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.cp_layout import CpMethod, check_context_parallel
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec


def check_divisibility(
    model: ModelSpec, mesh: Mesh, length: int, rows: int, slices: int = 1, cp_method: CpMethod = "ring"
) -> None:
    """Raises PentadError for the first size that an axis does not divide.

    A microbatch has `rows` sequences of `length` tokens, each cut into `slices`.
    """
    _check_tensor_parallel(model, mesh)
    if mesh.cp > 1 and slices > 1:
        raise PentadError(f"mesh.cp is {mesh.cp}: expected 1 for a schedule that cuts sequences into {slices} slices")
    check_context_parallel(length, model.heads, model.kv_heads, mesh.cp, cp_method, mesh.tp)
    _check_expert_parallel(model, mesh)
    tokens = rows * length // slices // mesh.cp
    if tokens % mesh.tp:
        product = f"{rows} x {length} / {slices * mesh.cp}" if slices * mesh.cp > 1 else f"{rows} x {length}"
        why = f"the tokens of a microbatch, {product} = {tokens}, for sequence parallelism"
        raise PentadError(f"mesh.tp is {mesh.tp}: expected a divisor of {why}")


def _check_tensor_parallel(model: ModelSpec, mesh: Mesh) -> None:
    sizes = {"heads": model.heads, "ffn": model.ffn, "vocab": model.vocab}
    if model.experts is not None:
        for name in ("intermediate_size", "shared_intermediate_size"):
            sizes[f"experts.{name}"] = getattr(model.experts, name)
    for name, size in sizes.items():
        if size % mesh.tp:
            raise PentadError(f"model.{name} is {size}: expected a multiple of mesh.tp = {mesh.tp}")
    if model.mla is None and model.kv_heads % mesh.tp and mesh.tp % model.kv_heads:
        expected = f"a multiple or a divisor of mesh.tp = {mesh.tp}"
        raise PentadError(f"model.kv_heads is {model.kv_heads}: expected {expected}")


def _check_expert_parallel(model: ModelSpec, mesh: Mesh) -> None:
    if model.experts is None:
        if mesh.ep > 1:
            raise PentadError(f"mesh.ep is {mesh.ep}: expected 1 for a model without experts")
    elif model.experts.num_experts % mesh.ep:
        found = f"model.experts.num_experts is {model.experts.num_experts}"
        raise PentadError(f"{found}: expected a multiple of mesh.ep = {mesh.ep}")
