"""Seconds of a plan's operations before it runs: from FLOPs and bytes, at assumed or measured rates.

T tokens of a piece, H hidden. A product of [T, a] and [a, b] counts 2Tab FLOPs; causal attention counts only the half
of the scores that is not masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pentad.orchestrator.activations.allocations import BYTES, Piece
from pentad.orchestrator.activations.offloaded_tensors import row_bytes
from pentad.orchestrator.planning.comm_volume import CommKind, Volume, stage_volume, waited_volume
from pentad.orchestrator.planning.fp8_costs import unfused_seconds, unread_seconds
from pentad.orchestrator.planning.hardware import (
    FP8_SPEEDUPS,
    NODE_GPUS,
    expert_flops,
    expert_rows,
    is_on_host,
    links_of,
)
from pentad.orchestrator.planning.parameter_collectives import (
    gather_seconds,
    num_mirrors,
    reduction_seconds,
    replica_seconds,
    updated_bytes,
)
from pentad.orchestrator.planning.part_flops import FORWARD_KERNELS, part_flops, part_kernels
from pentad.schedules.passes.recompute import ROW_WISE, recomputed_parts
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import Curve, Rates, rate_at
from pentad.schedules.spec.lora import LoraSpec, adapter_tensors
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec, Scaling
from pentad.schedules.spec.tensors import LayerRange, fp8_matrices, tensors

Kind = tuple[object, ...]


def guess_costs(
    model: ModelSpec,
    layers: Sequence[LayerRange],
    placement: Sequence[Sequence[int]],
    piece: Piece,
    rates: Rates,
    modes: Sequence[str] = (),
    zero: int = 0,
    lora: LoraSpec | None = None,
    offloaded: Sequence[int] = (),
    *,
    host_optimizer: bool = False,
    bf16_reduce: bool = False,
) -> Costs:
    """Seconds at these rates; embedding and head count towards the first and last stage.

    Slices of a sequence all cost the average, although attention costs the later ones more. `modes` are the plan's
    recomputation modes. The tp, cp and ep ranks of the piece's mesh split the work of a stage and add operations inside
    layers; ranks that hold the same parameters reduce their gradients, and with `zero` each updates a shard. The rank
    with the most parameters in `placement` determines the length of the end of a step. With `lora` only adapters have
    W, and ZeRO-3 gathers frozen weights as well; replicas of the piece's `zero_shards` sum their gradients. `offloaded`
    are the bytes of an OFFLOAD or RELOAD, by stage. With `host_optimizer` the state streams from host memory and back
    at the end of a step. With `bf16_reduce` gradients are reduced in bfloat16.
    """
    mesh, mirrors, shards = piece.mesh, num_mirrors(placement), piece.zero_shards
    reduced: dict[str, Any] = {"bf16": bf16_reduce, "mirrors": mirrors, "shards": shards}
    found, keys = dict[tuple[Kind, str], tuple[float, ...]](), list[tuple[Kind, str]]()
    for span, mode in zip(layers, modes or ("none",) * len(layers), strict=True):
        keys.append((kind_of(model, piece.fp8, span), mode))
        if keys[-1] not in found:
            stage = stage_seconds(model, span, piece, rates, lora)
            kept = piece._replace(logit_rows=0)  # the F that RECOMPUTE repeats makes no gradient of chunks of logits
            first = stage_seconds(model, span, kept, rates, lora) if mode == "full" and piece.logit_rows else stage
            found[keys[-1]] = (
                first.forward + _saving_seconds(model, span, mode, piece, rates),
                stage.backward,
                stage.weight,
                _recompute_seconds(model, span, stage, mode, piece, rates),
                reduction_seconds(model, lora, span, mesh, rates, zero, **reduced),
                gather_seconds(model, lora, span, piece, rates, zero, mirrors),
                replica_seconds(model, lora, span, mesh, rates, **reduced) if zero and shards else 0.0,
            )
    forward, backward, weight, again, reduce, gather, replicas = zip(*map(found.__getitem__, keys), strict=True)
    given = model, layers, placement, mesh, rates, zero, lora
    norm, step = end_seconds(*given, host_optimizer=host_optimizer, shards=shards)
    return Costs(
        forward=forward,
        backward=backward,
        weight=weight,
        transfer=transfer_seconds(model, piece, rates),
        reduce=reduce,
        gather=gather if zero else (),
        reduce_replicas=replicas if zero and shards else (),
        norm=norm,
        step=step,
        validate_step=step,
        launch=rates.launch,
        recompute=again if modes else (),
        offload=tuple(map(rates.host_memory.seconds, offloaded)),
    )


def kind_of(model: ModelSpec, fp8: Fp8Spec | None, span: LayerRange) -> Kind:
    """What the costs and sizes of a span of layers depend on, as a key."""
    if model.custom is not None:
        return span
    layers = (
        (number >= model.dense_layers, model.window(number), fp8 is None or fp8.covers(number, model.layers))
        for number in span.numbers
    )
    return *layers, span.has_embedding, span.has_head


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
    shards: int = 0,
) -> tuple[float, float]:
    """Seconds of NORM and STEP, at the end of a step."""
    kinds = [kind_of(model, None, span) for span in layers]
    replicas = num_mirrors(placement) * mesh.dp * mesh.ep if zero else 0
    sizes = {
        kind: updated_bytes(model, lora, span, mesh, replicas, shards)
        for kind, span in dict(zip(kinds, layers, strict=True)).items()
    }
    updated = max(sum(sizes[kinds[stage]] for stage in held) for held in placement)
    # reads master weights, both moments and gradients; writes the first three
    step = max(7 * updated / rates.update, host_optimizer * 3 * updated / rates.host_memory.bandwidth)
    return 2 * rates.intra_host.all_reduce.latency + updated / rates.memory, step


def transfer_seconds(model: ModelSpec, piece: Piece, rates: Rates) -> float:
    """Seconds to send an activation, or its gradient, to the next stage."""
    return links_of(rates, piece.mesh, ("pp",)).send.seconds(piece.stream(model.hidden))


class StageSeconds(NamedTuple):
    """Seconds of one piece on one stage; `parts` are those of F, by the parts of layers that RECOMPUTE can repeat."""

    forward: float
    backward: float
    weight: float
    parts: dict[str, float]


def lookup_seconds(model: ModelSpec, piece: Piece, rates: Rates) -> float:
    """Seconds of W of the embedding: it reads the gradients of rows and adds each to that of its token."""
    row_bytes = model.hidden * (piece.itemsize + 2 * BYTES["float32"])
    return row_bytes * piece.tokens / piece.mesh.tp / rates.memory


def stage_seconds(
    model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, lora: LoraSpec | None
) -> StageSeconds:
    """Compute and the communication in layers that it waits for; at least as long as the host needs to issue both."""
    compute = compute_seconds(model, span, piece, rates)
    if lora is not None:
        seconds = 2 * piece.tokens * _active_adapters(model, lora, span) / (rates.flops * piece.mesh.tp)
        forward, backward = compute.forward + seconds, compute.backward + 1.5 * seconds  # B computes x A^T again
        compute = compute._replace(forward=forward, backward=backward, weight=seconds)
    lookup = lookup_seconds(model, piece, rates)
    return StageSeconds(
        forward=_with_communication(model, span, piece, rates, "F", compute.forward),
        backward=_with_communication(model, span, piece, rates, "B", compute.backward),
        weight=max(
            compute.weight + lookup * (span.has_embedding and lora is None),
            _layer_issue(model, span, piece, rates, "W") * (lora is None),
        ),
        parts=compute.parts,
    )


class LayerMessages(NamedTuple):
    """What a rank sends of one kind inside F, B or RECOMPUTE of a stage. `seconds` are exposed, `hidden` ones overlap
    with compute; `on_host`: no message leaves the host."""

    axis: Axis
    kind: str
    operations: int
    bytes: int
    seconds: float
    hidden: float
    on_host: bool


def layer_messages(
    model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, phase: str
) -> Iterator[LayerMessages]:
    """By axis and kind. `phase` is as in `stage_volume`."""
    volumes = stage_volume(model, span, piece, phase, copied=is_copied(piece)) if model.custom is None else {}
    waited = waited_volume(model, span, piece, phase)
    for (axis, kind), volume in volumes.items():
        link = links_of(rates, piece.mesh, (axis,), in_layers=True).of(kind)
        on_host = is_on_host(piece.mesh, (axis,), rates.host_order)
        share = rates.tp_hidden if axis == "tp" and on_host else 0.0
        beside = share * (volume.bytes - waited.get(CommKind(axis, kind), Volume()).bytes)
        seconds = link.seconds(volume.bytes - beside, volume.operations)
        yield LayerMessages(axis, kind, *volume, seconds, link.seconds(beside, 0), on_host)


def is_copied(piece: Piece) -> bool:
    """Whether ranks exchange rows inside layers by peer copies."""
    return piece.device == "cuda" and piece.mesh.size <= NODE_GPUS


def _with_communication(
    model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, phase: str, seconds: float
) -> float:
    links, issued = 0.0, 0.0
    for messages in layer_messages(model, span, piece, rates, phase):
        links += messages.seconds
        issued += messages.operations * (rates.peer_issue if is_copied(piece) else rates.issue)
    return max(seconds + links, _layer_issue(model, span, piece, rates, phase) + issued)


def _layer_issue(model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates, phase: str) -> float:
    """Seconds that the host needs to issue F, B, W or a RECOMPUTE of parts of a stage, without the exchanges inside its
    layers. RECOMPUTE takes its share of the kernels in F of a dense layer, and at most as long as F."""
    if phase in ("F", "B", "W"):
        layers = len(span.numbers) + model.mtp_layers * span.has_head
        return layers * rates.layer_issue["FBW".find(phase)]
    saves_rows = piece.saved_rows > 0
    kernels = (part_kernels(model, layer, phase, saves_rows=saves_rows) for layer in span.numbers)
    return rates.layer_issue[0] * sum(min(1.0, count / FORWARD_KERNELS) for count in kernels)


def _recompute_seconds(
    model: ModelSpec, span: LayerRange, stage: StageSeconds, mode: str, piece: Piece, rates: Rates
) -> float:
    """Seconds of one RECOMPUTE of a stage."""
    if mode in ("none", "full"):
        return stage.forward if mode == "full" else 0.0
    rest = 1 - piece.saved_rows / piece.sequence_parallel_tokens  # share of rows
    parts = {part: seconds for part, seconds in stage.parts.items() if part in recomputed_parts(mode)}
    seconds = sum(seconds * (rest if part in ROW_WISE else 1.0) for part, seconds in parts.items())
    joined = row_bytes(model, span, piece, mode) if piece.saved_rows else 0
    return _with_communication(model, span, piece, rates, mode, seconds) + 2 * joined / rates.memory


def _saving_seconds(model: ModelSpec, span: LayerRange, mode: str, piece: Piece, rates: Rates) -> float:
    """Seconds that F spends copying the rows that RECOMPUTE does not make again."""
    if not piece.saved_rows or mode in ("none", "full"):
        return 0.0
    share = piece.saved_rows / piece.sequence_parallel_tokens
    return 2 * share * row_bytes(model, span, piece, mode) / rates.memory


def _active_adapters(model: ModelSpec, lora: LoraSpec, span: LayerRange) -> float:
    """Elements of the adapters that a token uses: for experts, only those of the top_k that it visits."""
    visited = 1.0 if model.experts is None else model.experts.top_k / model.experts.num_experts
    found = adapter_tensors(lora, tensors(model, span))
    return sum(math.prod(each.shape) * (visited if each.experts else 1.0) for each in found)


def compute_seconds(model: ModelSpec, span: LayerRange, piece: Piece, rates: Rates) -> StageSeconds:
    """Seconds of compute alone, without communication and without the host."""
    first, end, _, is_last = span
    if model.custom is not None:
        seconds = piece.rows * sum(layer.flops for layer in model.custom.layers[first:end]) / rates.flops
        return StageSeconds(seconds, seconds, seconds, {})
    experts = model.experts
    mtp_layers = model.mtp_layers if is_last else 0
    end += mtp_layers
    count, tokens = end - first, piece.tokens
    work = 2 * tokens / piece.mesh.tp  # FLOPs of a rank for each element of a matrix
    length = piece.length * piece.slices * piece.mesh.cp
    value = model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    # attention's scores and weighted values, in all layers
    attended = sum(model.attended_length(layer, length) for layer in range(first, end))
    scores, of_width = work / 2 * attended * model.heads * (model.qk_head_dim + value), rates.attention_of(value)
    attention = scores / rate_at(of_width.forward, length)
    # five products of the size of the scores instead of two
    attention_backward = 2.5 * scores / rate_at(of_width.backward, length)
    # All dense layers have the same matrices, and so have all layers with experts, not counting those of the experts.
    first_sparse = model.dense_layers
    alike = [layer if layer >= model.layers else first_sparse * (layer >= first_sparse) for layer in range(first, end)]
    sizes_of = {layer: sum(_dense_sizes(model, layer)) for layer in {*alike}}
    seconds_of = {layer: _dense_seconds(model, layer, work, rates.products) for layer in sizes_of}
    elements, dense = sum(map(sizes_of.__getitem__, alike)), sum(map(seconds_of.__getitem__, alike))
    pace = dense / (work * elements) if elements else 1 / rates.flops  # seconds a FLOP
    routed, width = 0, model.ffn  # expert visits of a token; summed width of the networks it passes in a layer
    if experts is not None:
        width = experts.top_k * experts.intermediate_size + experts.shared_intermediate_size
        routed = max(0, end - max(first, experts.first_k_dense)) * experts.top_k
    linear, of_experts = dense, _expert_seconds(model, routed, piece, rates)
    if piece.fp8 is not None and piece.device == "cuda":
        matrices = fp8_matrices(model, piece.fp8, range(first, end))
        sizes = [work * math.prod(each.shape) for each in matrices if not each.experts]
        linear -= sum(_saved_by_8bit(rates, piece.fp8.scaling, size) for size in sizes)
    head = _head_seconds(model, piece, rates) if is_last else HeadSeconds(*(0.0,) * 5)
    speed = linear / dense if dense else 1.0
    join_flops = work * 2 * model.hidden**2  # to join the hidden states with embeddings
    linear += mtp_layers * join_flops / rate_at(rates.products, join_flops)
    # memory traffic of norms, residual sums and activations, and of sorting rows by expert and summing them again
    values = count * (8 * model.hidden + 3 * width) / piece.mesh.tp + 3 * routed * model.hidden
    elementwise = tokens * piece.itemsize * values / rates.elementwise
    unread = unread_seconds(model, range(first, end - mtp_layers), piece, rates)
    unfused = unfused_seconds(model, range(first, end - mtp_layers), piece, rates)
    read, moved = max(0.0, elementwise - unread[0]) + unfused[0], max(0.0, 1.5 * elementwise - unread[1]) + unfused[1]
    counts = part_flops(model, span, length)
    parts = {part: speed * work / 2 * count * pace for part, count in counts.items()}
    parts["core_attn"] = work / 2 * counts["core_attn"] / rate_at(of_width.forward, length)
    if experts is not None:
        share = experts.top_k * experts.intermediate_size / width
        parts["moe"] = work / 2 * counts["moe"] * ((1 - share) * speed * pace + share * of_experts.pace)
    products = [part for part in counts if part != "core_attn" and counts[part]]
    for part in products:  # what is read and written around each
        parts[part] += elementwise / len(products)
    return StageSeconds(
        forward=linear + of_experts.forward + attention + head.forward + head.loss + read,
        backward=linear + of_experts.backward + attention_backward + head.backward + head.dloss + moved,
        weight=linear + of_experts.weight + head.weight,
        parts=parts,
    )


class ExpertSeconds(NamedTuple):
    """Seconds of the products of routed experts in F, B and W, and `pace`, seconds a FLOP of F."""

    forward: float
    backward: float
    weight: float
    pace: float


def _expert_seconds(model: ModelSpec, visits: int, piece: Piece, rates: Rates) -> ExpertSeconds:
    """For so many `visits` of a token to experts. W copies both of its operands, which are rows of tokens; the FP8 rate
    already includes these copies."""
    if model.experts is None or not visits:
        return ExpertSeconds(*(0.0,) * 4)
    rows, in_8_bits = expert_rows(model.experts, piece.tokens, piece.mesh), piece.casts_experts
    flops = visits * (2 * piece.tokens / piece.mesh.tp * 3 * model.hidden * model.experts.intermediate_size)
    measured = expert_flops(rates, rows, in_8_bits=in_8_bits and piece.device == "cuda")
    forward, backward, weight = (flops / each for each in measured)
    copies = 0.0 if in_8_bits else 4 * visits * piece.tokens * model.hidden * piece.itemsize / rates.memory
    return ExpertSeconds(forward, backward, weight + copies, forward / flops)


class HeadSeconds(NamedTuple):
    """Seconds of F, B and W of the head, and separately of the loss in F and B."""

    forward: float
    backward: float
    weight: float
    loss: float
    dloss: float


def _head_seconds(model: ModelSpec, piece: Piece, rates: Rates) -> HeadSeconds:
    """The head's products, also for multi-token prediction. The loss reads the logits; its gradient overwrites them and
    is cast. In chunks, F makes that gradient as well, and W makes it again."""
    width, count, chunks = model.vocab / piece.mesh.tp, 1 + model.mtp_layers, piece.logit_chunks.total()
    logits = piece.tokens * width
    flops = 2 * logits * model.hidden
    product = flops / rate_at(rates.products, flops / max(1, chunks))
    loss = count * logits * piece.itemsize / rates.memory
    if chunks:  # each reads and writes the gradient of the weight
        sums = count * (chunks - 1) * 2 * BYTES["float32"] * width * model.hidden / rates.memory
        products = 2 * count * product + 2 * loss
        return HeadSeconds(products, 0.0, products + sums, loss, 0.0)
    if piece.fp8 is None or not piece.fp8.head or piece.device != "cuda":
        return HeadSeconds(*(count * product,) * 3, loss, 2 * loss)
    # the gradient of the logits is read for both forms, and before that once more unless the scales are known
    reads = 1 if piece.fp8.scaling == "block" or piece.fp8.delayed else 2
    casts = logits * (reads * piece.itemsize + 2) / rates.elementwise
    products = count * product - _saved_by_8bit(rates, piece.fp8.scaling, flops)
    return HeadSeconds(*(products,) * 3, loss, 2 * loss + casts)


@lru_cache(maxsize=4096)
def _dense_sizes(model: ModelSpec, layer: int) -> tuple[int, ...]:
    """Elements of the matrices of a layer, without those of experts."""
    found = tensors(model, LayerRange(layer, layer + 1))
    return tuple(math.prod(each.shape) for each in found if len(each.shape) > 1 and not each.experts)


@lru_cache(maxsize=65536)
def _dense_seconds(model: ModelSpec, layer: int, work: float, products: Curve) -> float:
    """Seconds of the products with the matrices of `_dense_sizes`, at `work` FLOPs an element."""
    return sum(work * size / rate_at(products, work * size) for size in _dense_sizes(model, layer))


def _saved_by_8bit(rates: Rates, scaling: Scaling, flops: float) -> float:
    """Seconds that a product saves in FP8. Scalings that were not measured are derived from 'tensor' by their known
    ratio."""
    plain, speedup = rate_at(rates.products, flops), FP8_SPEEDUPS[scaling]
    if rates.products_8bit:
        speedup *= rate_at(rates.products_8bit, flops) / plain / FP8_SPEEDUPS["tensor"]
    return flops / plain * (1 - 1 / speedup)
