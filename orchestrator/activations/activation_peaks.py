"""Peak bytes of activations on a rank, counted along its instruction stream.

Every operation has an `Effect` on the bytes held. Effects in sequence combine: those of layers into a stage's, those of
instructions into a rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.activations import activation_memory as memory
from pentad.orchestrator.activations.allocations import LayerTraits, Piece, Totals, piece_of, total, traits_of
from pentad.orchestrator.activations.attention_memory import attention_shape
from pentad.orchestrator.activations.offloaded_tensors import cuts_of, slots_of
from pentad.schedules.ir.columns import CODE, OPS, Array, op_mask
from pentad.schedules.ir.instruction import COMPUTE, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload_arena import arena
from pentad.schedules.passes.offload_cut import Cut
from pentad.schedules.spec.model import CustomModel, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange

_HAS_EFFECT, _FREES = op_mask({*COMPUTE, Op.RECOMPUTE, Op.RELOAD}), op_mask({*COMPUTE, Op.RECOMPUTE})


class Effect(NamedTuple):
    """Change in the bytes held, at the end and at the peak."""

    held: int
    peak: int

    def without(self, allocated: int) -> Effect:
        """The effect if `allocated` bytes are allocated elsewhere but freed here."""
        return Effect(self.held - allocated, self.peak - allocated)


def allocate(size: int) -> Effect:
    return Effect(size, max(size, 0))


def workspace(size: int) -> Effect:
    return Effect(0, size)


def sequence(*effects: Effect) -> Effect:
    held = peak = 0
    for effect in effects:
        peak = max(peak, held + effect.peak)
        held += effect.held
    return Effect(held, peak)


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one piece on one stage.

    `saved` is held from F to B, including `input`, the residual stream that F received, which may lie in a receive slot
    instead; OFFLOAD leaves `not_offloadable` bytes. `joined` is the largest tensor recomputed by rows, as RECOMPUTE
    copies its rows together. `deferred` is held from B to W, including `incoming`, the gradient that B received, which
    may also lie in a slot. `kv_cache` and `kv_gradients` are shared by the slices of a microbatch. Effects count the
    input and the incoming gradient as allocated.
    """

    saved: int
    not_offloadable: int
    input: int
    deferred: int
    forward: Callable[[str], Effect]  # by recomputation mode
    backward: Effect
    weight: Effect
    backward_and_weight: Effect
    joined: int = 0
    incoming: int = 0
    kv_cache: int = 0
    kv_gradients: int = 0

    def kept(self, mode: str) -> int:
        """Bytes held after F, with this recomputation mode."""
        return self.forward(mode).held

    @property
    def recompute(self) -> int:
        """Workspace of RECOMPUTE: that of F, or the tensor whose rows are joined, if larger."""
        return max(self.joined, self.forward("none").peak - self.saved)


class LayerEffects(NamedTuple):
    totals: Totals
    incoming: int  # bytes of the gradient that B receives, which W reads
    forward: Effect
    backward: Effect


@lru_cache(maxsize=4096)
def layer_effects(model: ModelSpec, has_experts: bool, has_window: bool, piece: Piece) -> LayerEffects:
    stream, sublayers = piece.stream(model.hidden), memory.sublayers(model, has_experts, has_window, piece)
    parts = [[total(part) for part in sublayer] for sublayer in sublayers]
    totals = total(chain(*chain(*sublayers)))
    received = sum(each.bytes for each in chain(*sublayers[-1]) if each.what == memory.OUTPUT_GRADIENT)
    forward = sequence(
        allocate(2 * stream),  # the incoming branch, and what attention adds
        *(sequence(allocate(part.saved), workspace(part.forward)) for part in chain(*parts)),
        allocate(-2 * stream),
    )
    mixer, network = (
        [sequence(allocate(part.deferred - part.reused), workspace(part.backward)) for part in reversed(sublayer)]
        for sublayer in parts
    )
    # The gradient of the stream between the sublayers: the mixer's W may read it, otherwise it is separate.
    is_read = any(each.what == memory.OUTPUT_GRADIENT for each in chain(*sublayers[0])) and piece.keeps_operands
    gradient = allocate(0 if is_read else stream)
    freed = allocate(totals.reused - totals.saved - gradient.held)
    backward = sequence(*network, gradient, *mixer, freed)
    return LayerEffects(totals, received if piece.of_network(has_experts).keeps_operands else 0, forward, backward)


def stage_activations(model: ModelSpec, layers: Sequence[LayerRange], stage: int, piece: Piece) -> StageActivations:
    if model.custom is not None:
        return _custom_stage(model, model.custom, layers[stage], piece)
    held = layers[stage]
    return _stage(model, traits_of(model, held, piece), held.has_embedding, held.has_head, piece)


@lru_cache(maxsize=4096)
def _stage(model: ModelSpec, kinds: Sequence[LayerTraits], first: bool, last: bool, piece: Piece) -> StageActivations:
    layers = [
        layer_effects(model, has_experts, has_window, piece if is_covered else piece._replace(fp8=None))
        for has_experts, has_window, is_covered in kinds
    ]
    stream = piece.stream(model.hidden)
    copy = stream if model.norms == "after" and not first else 0  # of the input, which W reads
    end = total(memory.heads_and_mtp(model, piece) if last else ())
    of_head = total(memory.head(model, piece.of_head) if last else ())
    embedding = total(memory.lookup(model, piece) if first else ())
    parts = [*(layer.totals for layer in layers), end, embedding]
    deferred = sum(part.deferred for part in parts)
    kv = len(layers) * attention_shape(model, piece).keys_values if piece.slices > 1 else 0
    end_backward = sequence(
        allocate(end.deferred - end.reused), workspace(of_head.backward), allocate(end.reused - end.saved)
    )

    @cache
    def forward(mode: str) -> Effect:
        if mode == "full":
            return sequence(
                *(sequence(layer.forward, allocate(-layer.totals.saved)) for layer in layers),
                allocate(2 * stream + end.saved),
                workspace(of_head.forward),
                allocate(-2 * stream - end.saved),
                allocate(0 if first else stream),
            )
        recomputed = [sequence(layer.forward, allocate(-layer.totals.recomputed(mode, piece))) for layer in layers]
        return sequence(allocate(copy), *recomputed, allocate(end.saved), workspace(of_head.forward))

    blocks = [(end_backward, end.deferred, of_head.weight)]
    blocks += [(layer.backward, layer.totals.deferred, layer.totals.weight) for layer in reversed(layers)]
    blocks.append((allocate(-copy), 0, 0))
    blocks.append((allocate(embedding.deferred), embedding.deferred, embedding.weight))
    return StageActivations(
        saved=copy + sum(part.saved for part in parts),
        not_offloadable=sum(part.not_offloadable for part in parts),
        joined=max((layer.totals.largest_rows for layer in layers), default=0) * (piece.saved_rows > 0),
        input=stream,
        deferred=deferred,
        incoming=0 if last or not layers else layers[-1].incoming,
        kv_cache=piece.slices * kv * piece.itemsize,
        kv_gradients=(piece.slices - 1) * kv * piece.wide,
        forward=forward,
        backward=sequence(*(backward for backward, _, _ in blocks)),
        weight=Effect(-deferred, max(needed for _, _, needed in blocks)),
        backward_and_weight=_backward_and_weight(blocks, piece),
    )


def _backward_and_weight(blocks: Sequence[tuple[Effect, int, int]], piece: Piece) -> Effect:
    """BW of layers (B, bytes deferred, workspace of W): W runs at once, or during the next layer's B if that waits for
    other ranks only within attention."""
    effects: list[Effect] = []
    is_late, pending = piece.mesh.cp > 1 and piece.mesh.tp * piece.mesh.ep == 1, 0
    for backward, deferred, needed in blocks:
        effects += [backward, allocate(-pending), workspace(needed)]
        pending = deferred
        if not is_late:
            effects.append(allocate(-pending))
            pending = 0
    return sequence(*effects, allocate(-pending))


def _custom_stage(model: ModelSpec, custom: CustomModel, layers: LayerRange, piece: Piece) -> StageActivations:
    """The stage of a custom model; its layers run on meta tensors to be measured."""
    import torch

    from pentad.workers.custom.inspect import activation_bytes

    rows = piece.tokens // custom.length
    found = activation_bytes(custom, *layers[:2], model.hidden, rows, getattr(torch, piece.dtype))
    received = piece.full_stream(model.hidden) if layers.first else 0
    saved, most = found.saved + received, max(found.saved + received, found.deferred)
    return StageActivations(
        saved=saved,
        not_offloadable=found.saved - sum(found.offloadable),
        input=received,
        deferred=found.deferred,
        forward={"none": allocate(saved), "full": Effect(received, found.layer)}.__getitem__,
        backward=Effect(found.deferred - saved, most - saved),
        weight=Effect(-found.deferred, 0),
        backward_and_weight=Effect(-saved, most - saved),
    )


def activations_of(plan: Plan, stage: int) -> StageActivations:
    return stage_activations(plan.model, plan.layers, stage, piece_of(plan))


class ActivationPeak(NamedTuple):
    """Bytes on a rank's device, and bytes offloaded to its host."""

    device: int
    host: int


def activation_peaks(plan: Plan, rank: int) -> ActivationPeak:
    """The peak of a rank of the mesh over all programs of a plan, of which one runs at a time."""
    peaks = [activation_peak(plan, program, rank) for program in plan.programs]
    return ActivationPeak(*map(max, zip(*peaks, strict=True)))


def activation_peak(plan: Plan, program: Program, rank: int) -> ActivationPeak:
    """The peak of a rank of the mesh in one of the plan's programs."""
    pp = plan.mesh.coordinates(rank).pp
    _, peaks = bytes_over_stream(plan, program, pp)
    on_host = on_device = 0
    if _offloads(program, pp):
        held, slots = program.placement[pp], [(0, 0)] * program.stages
        for unit, each in zip(held, slots_of(plan, held), strict=True):
            slots[unit] = each
        on_host, on_device = arena(program, pp, slots).bytes
    return ActivationPeak(int(peaks.max(initial=0)) + on_device, on_host)


def bytes_over_stream(plan: Plan, program: Program, pp: int) -> tuple[Array, Array]:
    """([rows] bytes that a pipeline rank holds after each instruction, [rows] the most during it), in the order of
    `run_order`."""
    columns, (first, end) = program.columns, program.columns.rank_offsets[pp : pp + 2]
    places, mask = np.stack([*_places(program, pp)]), _HAS_EFFECT[columns.op[first:end]]
    effects, taken = np.zeros((2, end - first), np.int64), np.zeros(end - first, np.int64)
    held = program.placement[pp] if _offloads(program, pp) else ()
    cuts = dict(zip(held, cuts_of(plan, held), strict=True))
    shape = len(OPS), program.stages, *[2] * (len(places) - 2)
    kinds, index = np.unique(np.ravel_multi_index(tuple(places[:, mask]), shape), return_inverse=True)
    stages = {stage: activations_of(plan, stage) for stage in program.placement[pp]}
    each = zip(*(part.tolist() for part in np.unravel_index(kinds, shape)), strict=True)
    found = [_effect(plan, program, stages, cuts, _Place(*kind)) for kind in each]
    effects[:, mask] = np.array(found, np.int64).reshape(-1, 2).T[:, index]
    if cuts:  # frees what was copied by the OFFLOADs that an instruction waits for
        waits = slice(*columns.wait_offsets[[first, end]])
        row, sizes = columns.wait_row[waits] - first, np.zeros(program.stages, np.int64)
        sizes[list(cuts)] = [each.taken for each in cuts.values()]
        frees = (columns.wait_op[waits] == CODE[Op.OFFLOAD]) & _FREES[columns.op[first:end][row]]
        np.add.at(taken, row[frees], sizes[columns.wait_stage[waits][frees]])
    order = run_order(program, pp, is_local=plan.is_local)
    effects, taken = effects[:, order], taken[order]
    after = np.cumsum(effects[0] - taken)
    before = after - effects[0] + taken
    return after, np.maximum(before, before - taken + effects[1])


def run_order(program: Program, pp: int, *, is_local: bool) -> Array:
    """The rows of a pipeline rank, counted from its first, in the order in which they take memory. The backward of an
    overlapped pair starts first. If layers need no communication (`is_local`), the forward runs after it; otherwise the
    two alternate, which takes at most as much as forward, then backward."""
    columns, (first, end) = program.columns, program.columns.rank_offsets[pp : pp + 2]
    order = np.arange(end - first)
    pairs = np.flatnonzero(columns.is_second[first:end]) if is_local else order[:0]
    order[pairs], order[pairs - 1] = pairs - 1, pairs
    return order


class _Place(NamedTuple):
    """What the effect of an instruction depends on: its op code, its stage, whether the previous and next stages are on
    this rank as well, and whether this is the first and the last slice of a microbatch."""

    op: int
    stage: int
    has_previous: int
    has_next: int
    is_first_slice: int
    is_last_slice: int


def _places(program: Program, pp: int) -> Iterator[Array]:
    """The fields of `_Place`, by row of a rank."""
    columns, lookup, (first, end) = program.columns, program.lookup, program.columns.rank_offsets[pp : pp + 2]
    stage, number = columns.stage[first:end], columns.microbatch[first:end]
    yield from (columns.op[first:end], stage)
    for step in (-1, 1):
        other = stage + step
        exists = (other >= 0) & (other < program.stages) & (number >= 0) & (number < program.total_slices)
        row = lookup.forward[np.where(exists, other * program.total_slices + number, 0)]
        yield exists & (row >= 0) & (columns.rank[row] == pp)
    yield number % program.slices == 0
    yield (number + 1) % program.slices == 0


def _offloads(program: Program, pp: int) -> bool:
    first, end = program.columns.rank_offsets[pp : pp + 2]
    return bool((program.columns.op[first:end] == CODE[Op.OFFLOAD]).any())


def _effect(
    plan: Plan, program: Program, stages: dict[int, StageActivations], cuts: Mapping[int, Cut], at: _Place
) -> Effect:
    """A result stays until it is sent, or until the next stage reads it if that is on the same rank. RECOMPUTE of a
    unit that saves everything has no effect."""
    stage, mode = stages[at.stage], plan.recompute_mode(at.stage)
    previous, following = at.has_previous * stage.input, at.has_next * stage.input  # streams that stay on this rank
    input_in_slot = 0 if at.stage == 0 or at.has_previous else stage.input
    incoming_in_slot = 0 if at.has_next else stage.incoming
    match OPS[at.op]:
        case Op.F:
            if program.forward_only:
                effect = Effect(-at.is_last_slice * stage.kv_cache, stage.forward("full").peak - input_in_slot)
            else:
                effect = stage.forward(mode).without(input_in_slot)
            cache = allocate(at.is_first_slice * stage.kv_cache)
            return sequence(cache, allocate(-previous), allocate(following), effect)
        case Op.RECOMPUTE:
            made = stage.saved - stage.kept(mode)
            return Effect(0, 0) if mode == "none" else Effect(made, made + stage.recompute)
        case Op.RELOAD:
            return allocate(cuts[at.stage].taken)
        case Op.W:
            return sequence(stage.weight, Effect(incoming_in_slot, 0))
        case op:
            effect = stage.backward if op is Op.B else stage.backward_and_weight
            held = effect.held + input_in_slot - (incoming_in_slot if op is Op.B else 0)
            effect = Effect(held, effect.peak - incoming_in_slot)
            gradients = allocate(at.is_last_slice * stage.kv_gradients)
            freed = allocate(-at.is_first_slice * (stage.kv_cache + stage.kv_gradients))
            # If W reads the gradient that B received, the gradient that B returns is a separate tensor, allocated last.
            last = previous if stage.incoming else 0
            return sequence(gradients, allocate(-following), allocate(previous - last), effect, allocate(last), freed)
