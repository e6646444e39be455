"""Seconds of a plan's operations before anything was measured: from FLOPs and bytes, at assumed rates.

T tokens of a piece, H hidden. A product of [T, a] and [a, b] counts 2Tab FLOPs; causal attention counts the half of the
scores that is not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pentad.orchestrator.planning.activation_memory import BYTES, Piece
from pentad.orchestrator.planning.activation_peaks import stage_activations
from pentad.orchestrator.planning.comm_volume import Phase, stage_volume
from pentad.orchestrator.planning.hardware import ASSUMED_RATES, Rates, link_of, spans_hosts
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec
from pentad.schedules.spec.tensors import active_parameters, local_size

PHASES: tuple[Phase, ...] = ("F", "B", "selective")
REPLICA_AXES: tuple[Axis, ...] = ("dp", "ep", "cp")  # along which ranks hold the same parameters
GROUPED_EFFICIENCY = 0.5  # grouped products of experts attain so much of the FLOP/s of others
SINGLE_RANK = Mesh()


def guess_costs(
    model: ModelSpec,
    layers: Sequence[tuple[int, int]],
    batch: BatchSpec,
    device: str,
    dtype: str,
    slices: int = 1,
    modes: Sequence[str] = (),
    mesh: Mesh = SINGLE_RANK,
    cp_method: CpMethod = "ring",
    zero: int = 0,
) -> Costs:
    """Seconds at ASSUMED_RATES; embedding and head count to the first and last stage.

    Slices of a sequence cost the same, as their attention does on average. `modes` are the plan's of recomputation. The
    tp, cp and ep ranks of a `mesh` split the work of a stage and add operations inside layers; ranks that hold the same
    parameters reduce their gradients, and with `zero` each updates a shard.
    """
    rates = ASSUMED_RATES[device]
    length = batch.sequence_length // slices // mesh.cp
    piece = Piece(batch.micro_batch_size, length, dtype, device, slices, mesh, cp_method)
    compute = [_compute(model, span, piece, batch.sequence_length, rates) for span in layers]
    comm = {phase: [_communication(model, span, piece, phase, rates) for span in layers] for phase in PHASES}
    forward = tuple(of.overlapped(each.forward) for each, of in zip(compute, comm["F"], strict=True))
    backward = tuple(of.overlapped(each.backward) for each, of in zip(compute, comm["B"], strict=True))
    selective = tuple(of.overlapped(each.selective) for each, of in zip(compute, comm["selective"], strict=True))
    recompute = tuple(
        full if mode == "full" else part for full, part, mode in zip(forward, selective, modes, strict=False)
    )
    # W of the embedding clears a gradient, fills it and adds it
    lookup = 3 * BYTES["float32"] * model.vocab * model.hidden / mesh.tp / rates.memory
    activations = [stage_activations(model, layers, stage, piece) for stage in range(len(layers))]
    updated = max(_updated_bytes(model, span, mesh, batch.replicas if zero else 0) for span in layers)
    latency, bandwidth = link_of(rates, mesh, "pp")
    return Costs(
        forward,
        backward,
        tuple(of.weight + lookup * (span[0] == 0) for of, span in zip(compute, layers, strict=True)),
        transfer=latency + piece.stream(model.hidden) / bandwidth,
        reduce=max(_reduction(model, span, mesh, batch.replicas, rates) for span in layers),
        norm=2 * rates.intra_host_latency + updated / rates.memory,
        step=7 * updated / rates.memory,  # reads master weights, both moments, gradients; writes the former three
        launch=rates.launch,
        recompute=recompute,
        offload=tuple(
            rates.intra_host_latency + (of.saved - of.not_offloadable) / rates.host_memory for of in activations
        ),
    )


class ComputeSeconds(NamedTuple):
    """Seconds of one piece on one stage, without communication; `selective` is selective recomputation."""

    forward: float
    backward: float
    weight: float
    selective: float


def _compute(model: ModelSpec, span: tuple[int, int], piece: Piece, length: int, rates: Rates) -> ComputeSeconds:
    first, end = span
    if model.custom is not None:
        seconds = piece.rows * sum(layer.flops for layer in model.custom.layers[first:end]) / rates.flops
        return ComputeSeconds(seconds, seconds, seconds, 0.0)
    is_last = end == model.layers
    mtp_layers = model.mtp_layers if is_last else 0
    end += mtp_layers
    count, tokens, flops = end - first, piece.tokens, rates.flops * piece.mesh.tp
    value = model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    # scores and weighted values of one layer
    attention = tokens * length * model.heads * (model.qk_head_dim + value) / flops
    linear = 2 * tokens * sum(_active_parameters(model, layer) for layer in range(first, end)) / flops
    if model.experts is not None:
        routed = max(0, end - max(first, model.experts.first_k_dense)) * model.experts.top_k
        grouped = 3 * model.hidden * model.experts.intermediate_size * routed
        linear += 2 * tokens * grouped * (1 / GROUPED_EFFICIENCY - 1) / flops
    head = 2 * tokens * model.vocab * model.hidden * (1 + mtp_layers) / flops if is_last else 0.0
    linear += 2 * tokens * 2 * model.hidden**2 * mtp_layers / flops  # joins streams and embeddings
    # memory traffic of norms, residual sums and activations
    width = _ffn_width(model)
    elementwise = count * tokens * piece.itemsize * (8 * model.hidden + 3 * width) / piece.mesh.tp / rates.memory
    return ComputeSeconds(
        forward=linear + count * attention + head + elementwise,
        backward=linear + count * 2.5 * attention + head + 1.5 * elementwise,  # five products of scores instead of two
        weight=linear + head,
        selective=4 * tokens * count * model.hidden * width / flops + elementwise / 2,
    )


def _ffn_width(model: ModelSpec) -> int:
    """Of all networks that a token passes in a layer."""
    experts = model.experts
    if experts is None:
        return model.ffn
    return experts.top_k * experts.intermediate_size + experts.shared_intermediate_size


class CommSeconds(NamedTuple):
    """Seconds of a stage's communication inside layers, on links and of the host to start it."""

    links: float = 0.0
    host: float = 0.0

    def overlapped(self, compute: float) -> float:
        """Seconds with the stage's compute: layers wait for links, and devices for the host."""
        return max(compute + self.links, self.host)


def _communication(model: ModelSpec, span: tuple[int, int], piece: Piece, phase: Phase, rates: Rates) -> CommSeconds:
    links, operations = 0.0, 0
    volumes = stage_volume(model, span, piece, phase) if model.custom is None else {}
    for kind, volume in volumes.items():
        latency, bandwidth = link_of(rates, piece.mesh, kind.axis)
        links += volume.operations * latency + volume.bytes / bandwidth
        operations += volume.operations
    return CommSeconds(links, operations * rates.issue)


def _updated_bytes(model: ModelSpec, span: tuple[int, int], mesh: Mesh, replicas: int) -> float:
    """Bytes of a stage's gradients that one rank updates with: a shard over `replicas`, or all (0)."""
    dense, experts = (_gradient_bytes(model, span, mesh, experts=experts) for experts in (False, True))
    holders = max(1, replicas * mesh.cp)
    return dense / holders + experts / max(1, holders // mesh.ep)


def _gradient_bytes(model: ModelSpec, span: tuple[int, int], mesh: Mesh, *, experts: bool) -> int:
    """Of the experts of a stage, or of all else."""
    return BYTES["float32"] * local_size(model, *span, Mesh(tp=mesh.tp, ep=mesh.ep), experts=experts)


def _reduction(model: ModelSpec, span: tuple[int, int], mesh: Mesh, replicas: int, rates: Rates) -> float:
    """Seconds of an all-reduce of a stage's gradients; those of experts have fewer holders."""
    seconds = rates.intra_host_latency
    for experts in (False, True):
        size = _gradient_bytes(model, span, mesh, experts=experts)
        holders = mesh.cp * (replicas // mesh.ep if experts else replicas)
        axes = [axis for axis in REPLICA_AXES if axis != "ep" or not experts]
        is_remote = any(spans_hosts(mesh, axis) for axis in axes)
        seconds += 2 * size * (holders - 1) / holders / (rates.inter_host if is_remote else rates.intra_host)
    return seconds


@lru_cache(maxsize=4096)
def _active_parameters(model: ModelSpec, layer: int) -> int:
    return active_parameters(model, layer)


@lru_cache(maxsize=4096)
def local_parameters(model: ModelSpec, first: int, end: int, mesh: Mesh) -> int:
    """Parameters of a stage on one rank."""
    inner = Mesh(tp=mesh.tp, ep=mesh.ep)
    return sum(local_size(model, first, end, inner, experts=experts) for experts in (False, True))
