"""Seconds of a plan before anything was measured, from FLOPs and bytes at assumed rates.

T tokens of a microbatch (of its slice, where sequences are cut), S sequence, H hidden. A product of [T, a] and [a, b]
counts 2Tab FLOPs. Causal attention counts the half of its square that is not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pentad.orchestrator.planning.activation_memory import BYTES, Piece
from pentad.orchestrator.planning.activation_peaks import stage_activations
from pentad.orchestrator.planning.comm_volume import Inside, stage_flows
from pentad.orchestrator.planning.hardware import GUESSES, Rates, crosses, link
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec
from pentad.schedules.spec.tensors import active_parameters, local_size

WHEN: tuple[Inside, ...] = ("F", "B", "leaves")
HOLDING: tuple[Axis, ...] = ("dp", "ep", "cp")  # along which ranks hold the same parameters
GROUPED = 0.5  # what products of experts attain of the FLOP/s of others
ALONE = Mesh()


def guess_costs(
    model: ModelSpec,
    layers: Sequence[tuple[int, int]],
    batch: BatchSpec,
    device: str,
    dtype: str,
    slices: int = 1,
    modes: Sequence[str] = (),
    mesh: Mesh = ALONE,
    context: CpMethod = "ring",
    zero: int = 0,
) -> Costs:
    """Seconds from FLOPs and bytes at assumed rates (GUESSES); embedding and head count to the first and last stage.

    Slices of a sequence have even shares, as they have of attention on average. `modes` are the plan's of recompute.
    Of a `mesh` tp, cp and ep share out a stage's work and add operations inside layers, and holders of copies add up
    their gradients; with `zero` each steps on a shard.
    """
    rates = GUESSES[device]
    piece = Piece(batch.micro_batch_size, batch.sequence_length // slices // mesh.cp, dtype, device, slices, mesh, context)
    work = [_work(model, span, piece, batch.sequence_length, rates) for span in layers]
    # W of the embedding fills, reads, adds
    lookup = 3 * BYTES["float32"] * model.vocab * model.hidden / mesh.tp / rates.memory
    inside = {when: [_inside(model, span, piece, when, rates) for span in layers] for when in WHEN}
    forward = tuple(more.beside(of.forward) for of, more in zip(work, inside["F"], strict=True))
    again = tuple(
        seconds if mode == "full" else more.beside(of.leaves)
        for of, seconds, more, mode in zip(work, forward, inside["leaves"], modes, strict=False)  # no modes, no costs
    )
    activations = [stage_activations(model, layers, stage, piece) for stage in range(len(layers))]
    held = max(_stepped(model, span, mesh, batch.replicas if zero else 0) for span in layers)
    latency, speed = link(rates, mesh, "pp")
    return Costs(
        forward,
        tuple(more.beside(of.backward) for of, more in zip(work, inside["B"], strict=True)),
        tuple(of.weight + lookup * (span[0] == 0) for of, span in zip(work, layers, strict=True)),
        transfer=latency + piece.sequence_parallel_tokens * model.hidden * piece.itemsize / speed,
        reduce=max(_reduction(model, span, mesh, batch.replicas, rates) for span in layers),
        norm=2 * rates.latency + held / rates.memory,
        step=7 * held / rates.memory,  # reads master, m, v, gradient; writes master, m, v
        launch=rates.launch,
        recompute=again,
        offload=tuple(rates.latency + (of.saved - of.not_offloadable) / rates.host for of in activations),
    )


class Work(NamedTuple):
    """Seconds of one piece on one stage, without what ranks send each other; `leaves` are those of what selective
    recompute does again."""

    forward: float
    backward: float
    weight: float
    leaves: float


def _work(model: ModelSpec, span: tuple[int, int], piece: Piece, length: int, rates: Rates) -> Work:
    first, end = span
    if model.custom is not None:
        own = piece.rows * sum(layer.flops for layer in model.custom.layers[first:end]) / rates.flops
        return Work(own, own, own, 0.0)
    ahead = model.mtp_layers if end == model.layers else 0
    end += ahead
    count, tokens, width = end - first, piece.tokens, rates.flops * piece.mesh.tp
    value = model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    # one layer's scores and mixture, half of them masked
    square = tokens * length * model.heads * (model.qk_head_dim + value) / width
    linear = 2 * tokens * sum(_active(model, layer) for layer in range(first, end)) / width
    if model.experts is not None:
        visited = max(0, end - max(first, model.experts.first_k_dense)) * model.experts.top_k
        grouped = 3 * model.hidden * model.experts.intermediate_size * visited
        linear += 2 * tokens * grouped * (1 / GROUPED - 1) / width
    head = 2 * tokens * model.vocab * model.hidden * (1 + ahead) / width if end - ahead == model.layers else 0.0
    linear += 2 * tokens * 2 * model.hidden**2 * ahead / width  # what joins streams and embeddings
    # norms and sums of streams, and what stands between two products
    wide = _widths(model)
    passes = count * tokens * piece.itemsize * (8 * model.hidden + 3 * wide) / piece.mesh.tp / rates.memory
    return Work(
        forward=linear + count * square + head + passes,
        backward=linear + count * 2.5 * square + head + 1.5 * passes,  # five products where F had two
        weight=linear + head,
        leaves=4 * tokens * count * model.hidden * wide / width + passes / 2,
    )


def _widths(model: ModelSpec) -> int:
    """Of a token's feed-forward networks in a layer."""
    experts = model.experts
    return (
        model.ffn if experts is None else experts.top_k * experts.intermediate_size + experts.shared_intermediate_size
    )


class Sent(NamedTuple):
    """Seconds of what a stage's layers send meanwhile, and those of the host that starts it."""

    links: float = 0.0
    host: float = 0.0

    def beside(self, work: float) -> float:
        """With a stage's work: layers wait for links, devices wait for the host."""
        return max(work + self.links, self.host)


def _inside(model: ModelSpec, span: tuple[int, int], piece: Piece, when: Inside, rates: Rates) -> Sent:
    """Along each axis the latency of its operations, and its bytes."""
    links, operations = 0.0, 0
    flows = stage_flows(model, span, piece, when) if model.custom is None else {}
    for flow, sent in flows.items():
        latency, speed = link(rates, piece.mesh, flow.axis)
        links += sent.operations * latency + sent.bytes / speed
        operations += sent.operations
    return Sent(links, operations * rates.issue)


def _stepped(model: ModelSpec, span: tuple[int, int], mesh: Mesh, replicas: int) -> float:
    """Bytes of a stage's gradients that one of its holders steps on: all of them without `replicas`."""
    dense, experts = (_gradients(model, span, mesh, experts=experts) for experts in (False, True))
    copies = max(1, replicas * mesh.cp)
    return dense / copies + experts / max(1, copies // mesh.ep)


def _gradients(model: ModelSpec, span: tuple[int, int], mesh: Mesh, *, experts: bool) -> int:
    """Bytes, of the experts or of all else."""
    return BYTES["float32"] * local_size(model, *span, Mesh(tp=mesh.tp, ep=mesh.ep), experts=experts)


def _reduction(model: ModelSpec, span: tuple[int, int], mesh: Mesh, replicas: int, rates: Rates) -> float:
    """Seconds of an all-reduce of a stage's gradients: its experts have fewer holders than all else."""
    seconds, axes = rates.latency, [axis for axis in HOLDING if crosses(mesh, axis)]
    for experts in (False, True):
        held = _gradients(model, span, mesh, experts=experts)
        copies = mesh.cp * (replicas // mesh.ep if experts else replicas)
        far = [axis for axis in axes if axis != "ep" or not experts]
        _, speed = link(rates, mesh, far[0]) if far else (0.0, rates.link)
        seconds += 2 * held * (copies - 1) / copies / speed
    return seconds


@lru_cache(maxsize=4096)
def _active(model: ModelSpec, layer: int) -> int:
    return active_parameters(model, layer)


@lru_cache(maxsize=4096)
def parameters_held(model: ModelSpec, first: int, end: int, mesh: Mesh) -> int:
    """Of a stage, by one rank."""
    inner = Mesh(tp=mesh.tp, ep=mesh.ep)
    return sum(local_size(model, first, end, inner, experts=experts) for experts in (False, True))
