"""Seconds of the collectives of a stage's parameters: reductions of gradients and gathers of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

from pentad.orchestrator.activations.allocations import BYTES, Piece
from pentad.orchestrator.planning.hardware import links_of, ranks_on_host
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.lora import LoraSpec, shard_size, shard_tensors
from pentad.schedules.spec.mesh import DENSE_AXES, EXPERT_AXES, Axis, Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.tensors import LayerRange, gathered_in_8_bits


def local_parameters(model: ModelSpec, lora: LoraSpec | None, layers: LayerRange, mesh: Mesh) -> tuple[int, int]:
    """Trained parameters of a stage on one rank: without experts, and of experts."""
    return _shard_parameters(model, lora, layers, Mesh(tp=mesh.tp, ep=mesh.ep))


@lru_cache(maxsize=4096)
def _shard_parameters(model: ModelSpec, lora: LoraSpec | None, layers: LayerRange, mesh: Mesh) -> tuple[int, int]:
    found = (shard_tensors(model, lora, layers, experts=each, frozen=False) for each in (False, True))
    dense, experts = (shard_size(each, mesh) for each in found)
    return dense, experts


def num_mirrors(placement: Sequence[Sequence[int]]) -> int:
    """How many pipeline ranks hold each stage: two with DualPipe."""
    return sum(map(len, placement)) // len({stage for held in placement for stage in held})


def reduction_seconds(
    model: ModelSpec,
    lora: LoraSpec | None,
    span: LayerRange,
    mesh: Mesh,
    rates: Rates,
    zero: int,
    *,
    bf16: bool,
    mirrors: int = 1,
    shards: int = 0,
) -> float:
    """Seconds of an all-reduce of a stage's gradients, or with ZeRO of two reduce-scatters; within groups of `shards`
    if that is set. In `bf16`, terms are rounded, exchanged or read by peers, and summed; without ZeRO the sums are then
    gathered."""
    shards = shards if zero else 0
    shared = partial(_shared_seconds, model, lora, span, mesh, rates, mirrors, shards)
    if bf16:
        # On one host the rate of a reduce-scatter includes the sum.
        along = _along(DENSE_AXES, mirrors)
        held = ranks_on_host(mesh, along, rates.host_order)
        on_host = held % shards == 0 if shards else held == math.prod(getattr(mesh, axis) for axis in along)
        kind = "reduce_scatter" if zero and on_host else "all_to_all"
        narrow, (dense, experts) = BYTES["bfloat16"], local_parameters(model, lora, span, mesh)
        passes = BYTES["float32"] + narrow * (1 if kind == "reduce_scatter" else 2)
        terms = shared(kind, narrow)
        terms += passes * (dense + experts * (mirrors * mesh.dp * mesh.cp > 1)) / rates.memory
        return 2 * terms if zero else terms + shared("all_gather", narrow)
    if zero:
        return 2 * shared("reduce_scatter", BYTES["float32"])
    return shared("all_reduce", 2 * BYTES["float32"])


def replica_seconds(
    model: ModelSpec,
    lora: LoraSpec | None,
    span: LayerRange,
    mesh: Mesh,
    rates: Rates,
    *,
    bf16: bool,
    mirrors: int,
    shards: int,
) -> float:
    """Seconds that the replicas of each of a stage's `shards` take to sum their gradients; those on a host share its
    links with the replicas of other shards."""
    seconds, itemsize = 0.0, BYTES["bfloat16" if bf16 else "float32"]
    for size, shared in zip(local_parameters(model, lora, span, mesh), (DENSE_AXES, EXPERT_AXES), strict=True):
        along = _along(shared, mirrors)
        held, ranks = ranks_on_host(mesh, along, rates.host_order), math.prod(getattr(mesh, axis) for axis in along)
        replicas = mirrors * math.prod(getattr(mesh, axis) for axis in shared) // shards
        if replicas == 1 or not size:
            continue
        links = rates.intra_host
        if held < ranks:
            links = rates.inter_host.shared(max(1, held // shards), rates.intra_host)
        sent = itemsize * size / shards * (replicas - 1) / replicas
        kinds = ("all_to_all", "all_gather") if bf16 else ("reduce_scatter", "all_gather")
        both = sum(links.of(kind).seconds(sent) for kind in kinds)
        seconds += both if bf16 else links.all_reduce.seconds(2 * sent)
    return seconds


def gather_seconds(
    model: ModelSpec, lora: LoraSpec | None, span: LayerRange, piece: Piece, rates: Rates, zero: int, mirrors: int = 1
) -> float:
    """Seconds of an all-gather of a stage's weights with ZeRO. Adapters do not count beside frozen weights."""
    gathered, fp8 = (None, piece.fp8) if zero == 3 else (lora, None)
    given = model, gathered, span, piece.mesh, rates, mirrors, piece.zero_shards
    return _shared_seconds(*given, "all_gather", piece.itemsize, fp8)


def updated_bytes(
    model: ModelSpec, lora: LoraSpec | None, span: LayerRange, mesh: Mesh, replicas: int, shards: int
) -> float:
    """Bytes of a stage's gradients that one rank updates with: a shard, which is one of `shards` or divided over
    `replicas`; or all (0 replicas)."""
    dense, experts = (BYTES["float32"] * size for size in local_parameters(model, lora, span, mesh))
    if replicas and shards:
        return (dense + experts) / shards
    holders = max(1, replicas * mesh.cp)
    return dense / holders + experts / max(1, holders // mesh.ep)


def parameters_in_8_bits(model: ModelSpec, fp8: Fp8Spec | None, layers: LayerRange, mesh: Mesh) -> tuple[int, int]:
    """The part of `local_parameters` that ZeRO-3 gathers in FP8."""
    if fp8 is None or not fp8.gathers:
        return 0, 0
    return _shard_in_8_bits(model, fp8, layers, Mesh(tp=mesh.tp, ep=mesh.ep))


@lru_cache(maxsize=4096)
def _shard_in_8_bits(model: ModelSpec, fp8: Fp8Spec, layers: LayerRange, mesh: Mesh) -> tuple[int, int]:
    sizes = list[int]()
    for experts in (False, True):
        names = gathered_in_8_bits(model, fp8, layers, experts=experts)
        found = shard_tensors(model, None, layers, experts=experts, frozen=False)
        sizes.append(shard_size(tuple(each for each in found if each.name in names), mesh))
    return sizes[0], sizes[1]


def _shared_seconds(
    model: ModelSpec,
    lora: LoraSpec | None,
    span: LayerRange,
    mesh: Mesh,
    rates: Rates,
    mirrors: int,
    shards: int,
    kind: str,
    itemsize: int,
    fp8: Fp8Spec | None = None,
) -> float:
    """Seconds of a collective of a stage's parameters, of `itemsize` bytes each, or of one in FP8; experts have fewer
    holders."""
    seconds = 0.0
    sizes, narrow = local_parameters(model, lora, span, mesh), parameters_in_8_bits(model, fp8, span, mesh)
    for size, in_8_bits, shared in zip(sizes, narrow, (DENSE_AXES, EXPERT_AXES), strict=True):
        holders = shards or mirrors * math.prod(getattr(mesh, axis) for axis in shared)
        operations = (size > in_8_bits or shared == DENSE_AXES) + (in_8_bits > 0)
        sent = (itemsize * (size - in_8_bits) + in_8_bits) * (holders - 1) / holders
        along = shared if shards else _along(shared, mirrors)
        seconds += links_of(rates, mesh, along, group=shards).of(kind).seconds(sent, operations)
    return seconds


def _along(shared: tuple[Axis, ...], mirrors: int) -> tuple[Axis, ...]:
    """The axes of a collective: mirrors are as far apart as the ends of the pipeline."""
    return (*shared, "pp") if mirrors > 1 else shared
