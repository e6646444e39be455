"""What casts to FP8 cost beside products, and whether experts multiply in FP8: only where measurements say it is
faster."""

from __future__ import annotations

from collections.abc import Iterable

from pentad.orchestrator.activations.allocations import FP8_TILE, Piece
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.hardware import EXPERT_FLOPS, expert_rows
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import fp8_matrices


def in_8_bits(config: RunConfig, model: ModelSpec, rates: Rates) -> bool:
    """Whether experts multiply in FP8. Raises PentadError if they must (precision.fp8_experts = always) but cannot."""
    wanted, mesh, scaling = config.precision.fp8_experts, config.mesh.mesh, config.precision.matmul.removeprefix("fp8-")
    if wanted == "never" or (wanted == "auto" and model.experts is None):
        return False
    if wanted == "always" and (problem := _impossible(model, scaling, mesh)):
        raise PentadError(f"precision.fp8_experts is always, but {problem}: expected auto or never")
    batch, replicas = config.batch, config.mesh.dp * config.mesh.ep * config.schedule.microbatches
    tokens = batch.global_batch_size * batch.sequence_length // replicas // mesh.cp
    return wanted == "always" or not why_not(model, scaling, mesh, tokens, rates)


def why_not(model: ModelSpec, scaling: str, mesh: Mesh, tokens: int, rates: Rates | None) -> str:
    """Why experts stay in the compute dtype; '' if FP8 is faster with this many tokens of a microbatch on a rank, at
    these rates or else on an H200."""
    if problem := _impossible(model, scaling, mesh):
        return problem
    assert model.experts is not None
    rows, measured = expert_rows(model.experts, tokens, mesh), rates.experts if rates else ()
    is_known = len(measured) > 1
    known = [each.at(rows) for each in measured] if is_known else EXPERT_FLOPS
    wide, narrow = (sum(1 / flops for flops in each) for each in known)  # F, B and W have as many FLOPs
    where = f"with {rows:,.0f} rows of an expert by the rates of this GPU" if is_known else "on an H200"
    return f"in 8 bits their products take {narrow / wide:.2f} times as long {where}" if narrow >= wide else ""


def shared_in_8_bits(config: RunConfig, model: ModelSpec) -> bool:
    """Whether the shared expert multiplies in FP8: if its matrices are whole tiles on every rank."""
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


def unread_seconds(model: ModelSpec, layers: Iterable[int], piece: Piece, rates: Rates) -> tuple[float, float]:
    """Seconds that F and B of these layers save with delayed scaling: casts read neither the inputs of their products
    for a maximum first, nor the operands from which fused kernels make these inputs."""
    if piece.fp8 is None or not piece.fp8.delayed or piece.device != "cuda":
        return 0.0, 0.0
    forward, backward = 0, 0
    for matrix in fp8_matrices(model, piece.fp8, layers):
        outputs, inputs = matrix.shape
        is_unit = matrix.name.endswith(".down")  # whose input is made of twice as many values, gate and up
        forward += inputs * (1 + is_unit)
        # the gradient of the result; that of gate and up is made from both and the gradient of the unit's output;
        # attention's result is cast once more
        backward += outputs // 2 if matrix.name.endswith(".gate_up") else outputs
        backward += 2 * inputs * is_unit + inputs * matrix.name.endswith(".out")
    share = piece.tokens * piece.itemsize / piece.mesh.tp / rates.elementwise
    return forward * share, backward * share


def unfused_seconds(model: ModelSpec, layers: Iterable[int], piece: Piece, rates: Rates) -> tuple[float, float]:
    """Seconds that F and B of these layers lose with scales of rows, whose casts are separate kernels, compared with
    one scale a tensor: values are written in 16 bits, read for their maxima, and read again to be cast."""
    if piece.fp8 is None or piece.fp8.scaling != "row" or piece.device != "cuda":
        return 0.0, 0.0
    forward, backward = 0, 0
    for matrix in fp8_matrices(model, piece.fp8, layers):
        outputs, inputs = matrix.shape
        if matrix.name.endswith(".down"):  # the unit, whose kernels would read two and three times as many values again
            forward, backward = forward + inputs, backward + 8 * inputs
        elif not matrix.name.endswith(".out"):  # a norm
            forward, backward = forward + 2 * inputs, backward + 3 * inputs
        if not matrix.name.endswith(".gate_up"):  # gradients have maxima of rows and of columns
            backward += outputs
    share = piece.tokens * piece.itemsize / piece.mesh.tp / rates.elementwise
    return forward * share, backward * share
