"""Whether experts multiply in 8 bits: only where that is faster, as measured."""

from __future__ import annotations

from pentad.orchestrator.activations.allocations import FP8_TILE
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.hardware import EXPERT_FLOPS
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec


def in_8_bits(config: RunConfig, model: ModelSpec, rates: Rates) -> bool:
    """Raises PentadError if experts cannot multiply in 8 bits but are to (precision.fp8_experts = always)."""
    wanted, mesh, scaling = config.precision.fp8_experts, config.mesh.mesh, config.precision.matmul.removeprefix("fp8-")
    if wanted == "never" or (wanted == "auto" and model.experts is None):
        return False
    if wanted == "always" and (problem := _impossible(model, scaling, mesh)):
        raise PentadError(f"precision.fp8_experts is always, but {problem}: expected auto or never")
    return wanted == "always" or not why_not(model, scaling, mesh, rates)


def why_not(model: ModelSpec, scaling: str, mesh: Mesh, rates: Rates | None) -> str:
    """Why experts stay in the compute dtype, '' if 8 bits are faster at these rates, or on an H200."""
    if problem := _impossible(model, scaling, mesh):
        return problem
    known = rates.experts if rates and len(rates.experts) > 1 else EXPERT_FLOPS
    wide, narrow = (sum(1 / flops for flops in each) for each in known)  # F, B and W have as many FLOPs
    where = "on an H200" if known is EXPERT_FLOPS else "by the rates of this GPU"
    return f"in 8 bits their products take {narrow / wide:.2f} times as long {where}" if narrow >= wide else ""


def shared_in_8_bits(config: RunConfig, model: ModelSpec) -> bool:
    """Whether the shared expert multiplies in 8 bits: if its matrices are whole tiles on every rank."""
    return _shared_width(model, config.mesh.mesh) > 0 and not why_not_shared(model, config.mesh.mesh)


def why_not_shared(model: ModelSpec, mesh: Mesh) -> str:
    """Why a shared expert stays in the compute dtype, '' if it does not."""
    width = _shared_width(model, mesh)
    return f"its width of {width} on a rank is not whole tiles of {FP8_TILE}" if width % FP8_TILE else ""


def _shared_width(model: ModelSpec, mesh: Mesh) -> int:
    return 0 if model.experts is None else model.experts.shared_intermediate_size // mesh.tp


def _impossible(model: ModelSpec, scaling: str, mesh: Mesh) -> str:
    if model.experts is None:
        return "the model has no experts"
    width = model.experts.intermediate_size // mesh.tp
    if scaling != "block":
        return f"fp8-{scaling} has no products of experts"
    if model.expert_biases:
        return "they have biases"
    if model.hidden % FP8_TILE or width % FP8_TILE:
        return f"matrices of {model.hidden} x {width} on a rank are not whole tiles of {FP8_TILE}"
    return ""
