"""Which implementations of attention and of experts' products ranks use: precision.kernels, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pentad.orchestrator.activations.allocations import Piece, piece_of
from pentad.orchestrator.activations.attention_memory import CUDNN_WORKSPACE, attention_shape, in_order_workspace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import KernelChoice, KernelTimes
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

Shape = tuple[str, tuple[int, ...]]  # op and sizes, as in KernelTimes
CUDNN_HEAD_DIM = 128  # at most, of queries and of values, except with MLA
CUDNN_MLA = 192, 128


def kernel_shapes(model: ModelSpec, piece: Piece) -> list[Shape]:
    """The calls whose implementations can be measured: attention over full sequences, and products of experts with even
    routing, in the compute dtype. Ring attention, slices and windows have other calls."""
    if piece.device != "cuda" or piece.dtype != "bfloat16" or model.custom is not None:
        return []
    return [*_attention(model, piece), *_experts(model, piece)]


def _attention(model: ModelSpec, piece: Piece) -> Iterator[Shape]:
    is_split = piece.slices > 1 or (piece.mesh.cp > 1 and piece.cp_method != "ulysses")
    has_plain = any(not model.layer_kind(layer).window for layer in range(model.layers))
    if is_split or not has_plain or model.attn_logit_softcapping:
        return
    shape = attention_shape(model, piece)
    for backward in (False, True):
        yield shape.kernel_op(backward=backward), shape.kernel_sizes


def _experts(model: ModelSpec, piece: Piece) -> Iterator[Shape]:
    experts = model.experts
    if experts is None or (piece.fp8 is not None and piece.fp8.experts):
        return
    rows, local = piece.tokens * experts.top_k, experts.num_experts // piece.mesh.ep
    width = experts.intermediate_size // piece.mesh.tp
    for n, k in ((2 * width, model.hidden), (model.hidden, width)):
        yield "grouped_gemm", (rows, local, n, k)
        yield "grouped_gemm_transposed", (rows, local, k, n)


def chosen_kernels(plan: Plan, times: Iterable[KernelTimes]) -> KernelChoice:
    """The plan's kernels, with the fastest implementation of each of its calls that was measured. Raises PentadError
    for kernels that the ranks do not have."""
    name = plan.kernels.name
    if problem := _impossible(plan):
        others = "auto or torch" if plan.device == "cpu" or plan.dtype == "float64" else "auto or triton"
        raise PentadError(f"precision.kernels is {name} {problem}: expected {others}")
    if name != "auto" or plan.batch.capacity:
        return plan.kernels
    known = {(each.op, each.sizes): each for each in times}
    found = [known[shape] for shape in kernel_shapes(plan.model, piece_of(plan)) if shape in known]
    return plan.kernels._replace(measured=tuple((each.key, each.fastest) for each in found))


def _impossible(plan: Plan) -> str:
    """Why the ranks cannot use the kernels, '' if they can."""
    name, model = plan.kernels.name, plan.model
    if name in ("auto", "torch"):
        return ""
    widths = model.qk_head_dim, model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    reasons = {
        "on CPUs": plan.device == "cpu",
        "with precision.compute = float64": plan.dtype == "float64",
    }
    if name == "cudnn":
        is_served = widths == CUDNN_MLA or max(widths) <= CUDNN_HEAD_DIM
        served = f"at most {CUDNN_HEAD_DIM}, in multiples of 8, or {CUDNN_MLA[0]} and {CUDNN_MLA[1]}"
        adds_in_order, piece = plan.kernels.cudnn_frontend or not plan.deterministic, piece_of(plan)
        has_room = not plan.deterministic or in_order_workspace(attention_shape(model, piece), whole=True) > 0
        reasons |= {
            "with precision.deterministic = true, but cuDNN's backward adds in a fixed order on Hopper GPUs alone, with"
            " nvidia-cudnn-frontend installed": not adds_in_order,
            f"with precision.deterministic = true and attention to {piece.length} tokens, for which cuDNN needs more"
            f" than {CUDNN_WORKSPACE >> 30} GiB": adds_in_order and is_served and not has_room,
            f"with precision.compute = {plan.dtype}, but cuDNN's attention has 16 bits": plan.dtype != "bfloat16",
            "with model.custom, whose attention is its own": model.custom is not None,
            "with data.document_mask = true, but cuDNN's attention has no documents": plan.data.document_mask,
            "with data.balance = dynamic, where every step has other shapes": plan.batch.capacity > 0,
            "with sliding windows, which cuDNN's attention has none of": any(
                model.layer_kind(layer).window for layer in range(model.layers)
            ),
            "with model.attn_logit_softcapping, which cuDNN's attention has not": model.attn_logit_softcapping > 0,
            f"with schedule.name = {plan.program.name}, but cuDNN's causal mask begins at the first key and not at that"
            " of a slice": plan.program.slices > 1,
            f"with heads of {widths[0]} and values of {widths[1]}, but cuDNN's are of {served}": not (
                is_served and not widths[0] % 8 and not widths[1] % 8
            ),
        }
    return next((reason for reason, holds in reasons.items() if holds), "")
