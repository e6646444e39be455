"""Whether experts multiply in 8 bits: not where they are too small to gain from it.

In a step an expert's weights are cast once in both forms, 4 bytes moved for each, and F and B multiply each row of its
tokens by every weight. So there is a least number of rows from which the products gain more than the casts take. Other
casts are part of kernels that move fewer bytes for them.
"""

from __future__ import annotations

from pentad.orchestrator.activations.allocations import FP8_TILE
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.hardware import EXPERT_FLOPS, FP8_EXPERT_WIDTH
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec

CAST_BANDWIDTH = 3.8e12  # bytes/s of a cast of weights on an H200


def least_rows() -> float:
    """Of an expert in a step: where 4 bytes of every weight take as long as 4 FLOPs of every row gain."""
    return 1 / (CAST_BANDWIDTH * (1 / EXPERT_FLOPS["compute"] - 1 / EXPERT_FLOPS["block"]))


def in_8_bits(config: RunConfig, model: ModelSpec) -> bool:
    """Raises PentadError if experts cannot multiply in 8 bits but are to (precision.fp8_experts = always)."""
    wanted, mesh, scaling = config.precision.fp8_experts, config.mesh.mesh, config.precision.matmul.removeprefix("fp8-")
    if model.experts is None or wanted == "never":
        return False
    if wanted == "always" and (problem := _impossible(model, scaling, mesh)):
        raise PentadError(f"precision.fp8_experts is always, but {problem}: expected auto or never")
    tokens = config.batch.global_batch_size * config.batch.sequence_length
    return wanted == "always" or not why_not(model, scaling, mesh, tokens)


def why_not(model: ModelSpec, scaling: str, mesh: Mesh, tokens: int) -> str:
    """Why experts stay in the compute dtype, '' if 8 bits are faster with so many tokens a step."""
    experts = model.experts
    assert experts is not None
    width, rows = experts.intermediate_size // mesh.tp, tokens * experts.top_k // experts.num_experts
    rows //= mesh.dp * mesh.cp  # that one copy of an expert gets
    if problem := _impossible(model, scaling, mesh):
        return problem
    if width < FP8_EXPERT_WIDTH:
        return f"{width} columns on a rank are fewer than the {FP8_EXPERT_WIDTH} from which 8 bits are faster"
    if rows < least_rows():
        return f"{rows} rows an expert and step gain less than the cast of its weights takes"
    return ""


def _impossible(model: ModelSpec, scaling: str, mesh: Mesh) -> str:
    assert model.experts is not None
    width = model.experts.intermediate_size // mesh.tp
    if scaling != "block":
        return f"fp8-{scaling} has no products of experts"
    if model.expert_biases:
        return "they have biases"
    if model.hidden % FP8_TILE or width % FP8_TILE:
        return f"matrices of {model.hidden} x {width} on a rank are not whole tiles of {FP8_TILE}"
    return ""
