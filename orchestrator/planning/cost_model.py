"""Seconds of a plan's operations before any are measured: from FLOPs and bytes, at assumed rates.

T tokens of a piece, H hidden. A product of [T, a] and [a, b] counts 2Tab FLOPs; causal attention counts the half of the
scores that is not masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pentad.orchestrator.activations.allocations import BYTES, Piece
from pentad.orchestrator.planning.comm_volume import stage_volume
from pentad.orchestrator.planning.hardware import EXPERT_FLOPS, FP8_SPEEDUPS, Rates, link_of, rates_of
from pentad.orchestrator.planning.part_flops import part_flops
from pentad.schedules.passes.recompute import recomputed_parts
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.lora import LoraSpec, adapter_tensors, shard_size, shard_tensors
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import LayerRange, active_parameters, fp8_matrices, tensors

GROUPED_EFFICIENCY = 0.5  # of the FLOP/s of other products is what grouped products of experts attain
_active_parameters = lru_cache(maxsize=4096)(active_parameters)


def guess_costs(
    model: ModelSpec,
    layers: Sequence[LayerRange],
    placement: Sequence[Sequence[int]],
    piece: Piece,
    modes: Sequence[str] = (),
    zero: int = 0,
    lora: LoraSpec | None = None,
    offloaded: Sequence[int] = (),
    *,
    host_optimizer: bool = False,
    rates: Rates | None = None,
) -> Costs:
    """Seconds at these `rates` (None: those of `rates_of`); embedding and head count to the first and last stage.

    Slices of a sequence cost the same, as their attention does on average. `modes` are the plan's of recomputation. The
    tp, cp and ep ranks of the piece's mesh split the work of a stage and add operations inside layers; ranks that hold
    the same parameters reduce their gradients, and with `zero` each updates a shard. The rank whose
    stages in `placement` have most parameters decides how long the end of a step takes. With `lora` only adapters have
    W, and ZeRO-3 gathers what is frozen as well. `offloaded` are the bytes of an OFFLOAD or RELOAD, by stage. A
    `host_optimizer` has its state in host memory, from where it comes at the end of a step while it goes back.
    """
    rates, mesh = rates or rates_of(piece.device, piece.gpu), piece.mesh
    stages = [_stage_seconds(model, span, piece, rates, lora) for span in layers]
    again = [_recompute_seconds(model, *each, piece, rates) for each in zip(layers, stages, modes, strict=False)]
    norm, step = end_seconds(model, layers, placement, mesh, rates, zero, lora, host_optimizer=host_optimizer)
    return Costs(
        forward=tuple(each.forward for each in stages),
        backward=tuple(each.backward for each in stages),
        weight=tuple(each.weight for each in stages),
        transfer=transfer_seconds(model, piece, rates),
        reduce=tuple(reduction_seconds(model, lora, span, mesh, rates) for span in layers),
        gather=_frozen_gathers(model, layers, piece, rates) if lora is not None and zero == 3 else (),
        norm=norm,
        step=step,
        launch=rates.launch,
        recompute=tuple(again),
        offload=tuple(rates.intra_host_latency + each / rates.host_memory for each in offloaded),
    )


def end_seconds(
    model: ModelSpec,
    layers: Sequence[LayerRange],
    placement: Sequence[Sequence[int]],
    mesh: Mesh,
    rates: Rates,
    zero: int,
    lora: LoraSpec | None,
    *,
    host_optimizer: bool,
) -> tuple[float, float]:
    """Seconds of NORM and STEP, at the end of a step."""
    sizes = [_updated_bytes(model, lora, span, mesh, mesh.dp * mesh.ep if zero else 0) for span in layers]
    updated = max(sum(sizes[stage] for stage in held) for held in placement)
    # reads master weights, both moments, gradients; writes the former three
    step = max(7 * updated / rates.memory, host_optimizer * 3 * updated / rates.host_memory)
    return 2 * rates.intra_host_latency + updated / rates.memory, step


def transfer_seconds(model: ModelSpec, piece: Piece, rates: Rates) -> float:
    """Of an activation, or its gradient, to the next stage."""
    latency, bandwidth = link_of(rates, piece.mesh, ("pp",))
    return latency + piece.stream(model.hidden) / bandwidth


class StageSeconds(NamedTuple):
    """Seconds of one piece on one stage, and those of F by the part of layers that RECOMPUTE can repeat."""

    forward: float
    backward: float
    weight: float
    parts: dict[str, float]


def _stage_seconds(
    model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, lora: LoraSpec | None
) -> StageSeconds:
    """Compute, and communication inside layers, for which they wait; devices wait for the host to start it."""
    compute = _compute_seconds(model, span, piece, rates)
    if lora is not None:
        adapters = _active_adapters(model, lora, span)
        seconds = 2 * piece.tokens * adapters / (rates.flops * piece.mesh.tp)
        forward, backward = compute.forward + seconds, compute.backward + 1.5 * seconds  # B computes x A^T again
        compute = compute._replace(forward=forward, backward=backward, weight=seconds)
    # W of the embedding clears a gradient, fills it and adds it
    lookup = 3 * BYTES["float32"] * model.vocab * model.hidden / piece.mesh.tp / rates.memory
    return StageSeconds(
        forward=_with_communication(model, span, piece, rates, "F", compute.forward),
        backward=_with_communication(model, span, piece, rates, "B", compute.backward),
        weight=compute.weight + lookup * (span.has_embedding and lora is None),
        parts=compute.parts,
    )


def _with_communication(
    model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, phase: str, seconds: float
) -> float:
    links, operations = 0.0, 0
    volumes = stage_volume(model, span, piece, phase) if model.custom is None else {}
    for kind, volume in volumes.items():
        latency, bandwidth = link_of(rates, piece.mesh, (kind.axis,), kind.kind)
        exposed = 1 - rates.tp_hidden if kind.axis == "tp" else 1.0
        links += volume.operations * latency + exposed * volume.bytes / bandwidth
        operations += volume.operations
    return max(seconds + links, operations * rates.issue, len(span.numbers) * rates.layer_issue)


def _recompute_seconds(
    model: ModelSpec, span: LayerRange, stage: StageSeconds, mode: str, piece: Piece, rates: Rates
) -> float:
    """Of one RECOMPUTE of a stage."""
    if mode in ("none", "full"):
        return stage.forward if mode == "full" else 0.0
    seconds = sum(stage.parts.get(part, 0.0) for part in recomputed_parts(mode))
    return _with_communication(model, span, piece, rates, mode, seconds)


def _active_adapters(model: ModelSpec, lora: LoraSpec, span: LayerRange) -> float:
    """Elements of adapters that a token uses: of those of experts only the top_k that it visits."""
    visited = 1.0 if model.experts is None else model.experts.top_k / model.experts.num_experts
    found = adapter_tensors(lora, tensors(model, span))
    return sum(math.prod(each.shape) * (visited if each.experts else 1.0) for each in found)


def _compute_seconds(model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates) -> StageSeconds:
    first, end, _, is_last = span
    if model.custom is not None:
        seconds = piece.rows * sum(layer.flops for layer in model.custom.layers[first:end]) / rates.flops
        return StageSeconds(seconds, seconds, seconds, {})
    experts = model.experts
    mtp_layers = model.mtp_layers if is_last else 0
    end += mtp_layers
    count, tokens, flops = end - first, piece.tokens, rates.flops * piece.mesh.tp
    length = piece.length * piece.slices * piece.mesh.cp
    value = model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    # scores and weighted values of all layers
    attended = sum(model.attended_length(layer, length) for layer in range(first, end))
    attention = tokens * attended * model.heads * (model.qk_head_dim + value) / flops
    slower = rates.flops / rates.attention if rates.attention else 1.0
    attention *= slower
    linear = 2 * tokens * sum(_active_parameters(model, layer) for layer in range(first, end)) / flops
    expert_gains = [0.0, 0.0, 0.0]  # in F, B and W
    width = model.ffn  # of all networks that a token passes in a layer
    if experts is not None:
        width = experts.top_k * experts.intermediate_size + experts.shared_intermediate_size
        routed = max(0, end - max(first, experts.first_k_dense)) * experts.top_k
        grouped = 3 * model.hidden * experts.intermediate_size * routed
        linear += 2 * tokens * grouped * (1 / GROUPED_EFFICIENCY - 1) / flops
        if piece.casts_experts and piece.device == "cuda":
            seconds = 2 * tokens * grouped / GROUPED_EFFICIENCY / flops
            pairs = zip(EXPERT_FLOPS["compute"], EXPERT_FLOPS["block"], strict=True)
            expert_gains = [seconds * (1 - compute / block) for compute, block in pairs]
    plain = linear
    if piece.fp8 is not None and piece.device == "cuda":
        matrices = fp8_matrices(model, piece.fp8, range(first, end))
        covered = sum(math.prod(each.shape) for each in matrices if not each.experts)
        linear -= 2 * tokens * covered * (1 - 1 / FP8_SPEEDUPS[piece.fp8.scaling]) / flops
    head = 2 * tokens * model.vocab * model.hidden * (1 + mtp_layers) / flops if is_last else 0.0
    speed = (linear - expert_gains[0]) / plain if plain else 1.0
    linear += 2 * tokens * 2 * model.hidden**2 * mtp_layers / flops  # joins streams and embeddings
    # memory traffic of norms, residual sums and activations
    elementwise = count * tokens * piece.itemsize * (8 * model.hidden + 3 * width) / piece.mesh.tp / rates.memory
    counts = part_flops(model, span, length)
    if experts is not None:
        share = experts.top_k * experts.intermediate_size / width
        counts["moe"] *= 1 + share * (1 / GROUPED_EFFICIENCY - 1)
    parts = {
        part: (slower if part == "core_attn" else speed) * tokens * count / flops for part, count in counts.items()
    }
    products = [part for part in counts if part != "core_attn" and counts[part]]
    for part in products:  # what is read and written around each
        parts[part] += elementwise / len(products)
    return StageSeconds(
        forward=linear - expert_gains[0] + attention + head + elementwise,
        # five products of scores instead of two
        backward=linear - expert_gains[1] + 2.5 * attention + head + 1.5 * elementwise,
        weight=linear - expert_gains[2] + head,
        parts=parts,
    )


@lru_cache(maxsize=4096)
def local_parameters(model: ModelSpec, lora: LoraSpec | None, layers: LayerRange, mesh: Mesh) -> tuple[int, int]:
    """Trained parameters of a stage on one rank: of everything but experts, and of experts."""
    found = (shard_tensors(model, lora, layers, experts=each, frozen=False) for each in (False, True))
    dense, experts = (shard_size(each, Mesh(tp=mesh.tp, ep=mesh.ep)) for each in found)
    return dense, experts


def _updated_bytes(model: ModelSpec, lora: LoraSpec | None, span: LayerRange, mesh: Mesh, replicas: int) -> float:
    """Bytes of a stage's gradients that one rank updates with: a shard over `replicas`, or all (0)."""
    dense, experts = (BYTES["float32"] * size for size in local_parameters(model, lora, span, mesh))
    holders = max(1, replicas * mesh.cp)
    return dense / holders + experts / max(1, holders // mesh.ep)


def _frozen_gathers(model: ModelSpec, layers: Sequence[LayerRange], piece: Piece, rates: Rates) -> tuple[float, ...]:
    """Seconds of an all-gather of each stage's frozen weights, beside which its adapters do not count."""
    share = piece.itemsize / BYTES["float32"] / 2
    return tuple(share * reduction_seconds(model, None, span, piece.mesh, rates) for span in layers)


def reduction_seconds(model: ModelSpec, lora: LoraSpec | None, span: LayerRange, mesh: Mesh, rates: Rates) -> float:
    """Seconds of an all-reduce of a stage's gradients; those of experts have fewer holders."""
    seconds = rates.intra_host_latency
    axes: tuple[Axis, ...] = ("dp", "cp")  # along which ranks hold the same experts
    groups: tuple[tuple[Axis, ...], ...] = ((*axes, "ep"), axes)
    for size, shared in zip(local_parameters(model, lora, span, mesh), groups, strict=True):
        holders = math.prod(getattr(mesh, axis) for axis in shared)
        _, rate = link_of(rates, mesh, shared, "all_reduce")
        seconds += 2 * BYTES["float32"] * size * (holders - 1) / holders / rate
    return seconds
