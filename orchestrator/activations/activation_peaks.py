"""Peak bytes of activations on a rank, counted along its instruction stream.

Every operation has an `Effect` on the bytes held. The effects of layers in sequence make that of a stage, and those of
instructions in sequence make that of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from pentad.orchestrator.activations import activation_memory as memory
from pentad.orchestrator.activations.activation_memory import cuts_of, slots_of
from pentad.orchestrator.activations.allocations import Piece, Totals, piece_of, total
from pentad.orchestrator.activations.attention_memory import attention_shape
from pentad.schedules.ir.instruction import Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload_arena import arena
from pentad.schedules.spec.model import CustomModel, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange

OPS = (Op.F, Op.B, Op.W, Op.BW, Op.RECOMPUTE, Op.RELOAD)


class Effect(NamedTuple):
    """Change in the bytes held, at the end and at the peak."""

    held: int
    peak: int

    def without(self, allocated: int) -> Effect:
        """With `allocated` bytes that are allocated elsewhere but freed here."""
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

    `saved` from F to B, `input` of it the residual stream that F received, which may lie in a receive slot instead;
    OFFLOAD leaves those `not_offloadable`. `deferred` from B to
    W, of which `incoming` is the gradient that B received, which may lie in a slot too. `kv_cache` and `kv_gradients`
    are shared by the slices of a microbatch. Effects count the input and the incoming gradient as allocated.
    """

    saved: int
    not_offloadable: int
    input: int
    deferred: int
    forward: dict[str, Effect]  # by what is recomputed
    backward: Effect
    weight: Effect
    backward_and_weight: Effect
    incoming: int = 0
    kv_cache: int = 0
    kv_gradients: int = 0

    def kept(self, mode: str) -> int:
        """Bytes from F on, with 'none', 'selective' or 'full' recomputation."""
        return self.forward[mode].held

    @property
    def recompute(self) -> int:
        """Workspace of F."""
        return max(0, self.forward["none"].peak - self.saved)


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
        allocate(2 * stream),  # the branch that came in, and what attention adds
        *(sequence(allocate(part.saved), workspace(part.forward)) for part in chain(*parts)),
        allocate(-2 * stream),
    )
    mixer, network = (
        [sequence(allocate(part.deferred - part.reused), workspace(part.backward)) for part in reversed(sublayer)]
        for sublayer in parts
    )
    gradient = allocate(stream)  # of the stream between the sublayers
    freed = allocate(totals.reused - totals.saved - stream)
    backward = sequence(*network, gradient, *mixer, freed)
    return LayerEffects(totals, received if piece.of_network(has_experts).keeps_operands else 0, forward, backward)


def stage_activations(model: ModelSpec, layers: Sequence[LayerRange], stage: int, piece: Piece) -> StageActivations:
    if model.custom is not None:
        return _custom_stage(model, model.custom, layers[stage], piece)
    return _stage(model, layers[stage], piece)


@lru_cache(maxsize=4096)
def _stage(model: ModelSpec, held: LayerRange, piece: Piece) -> StageActivations:
    layers = [
        layer_effects(
            model,
            number >= model.dense_layers,
            model.layer_kind(number).window > 0,
            piece.of_layer(number, model.layers),
        )
        for number in held.numbers
    ]
    first, last, stream = held.has_embedding, held.has_head, piece.stream(model.hidden)
    copy = stream if model.norms == "after" and not first else 0  # of the input, which W reads
    end = total(memory.heads_and_mtp(model, piece._replace(fp8=None)) if last else ())
    embedding = total(memory.lookup(model, piece) if first else ())
    parts = [*(layer.totals for layer in layers), end, embedding]
    deferred = sum(part.deferred for part in parts)
    # W of the embedding fills a gradient of all its rows, and of the pieces' in its width
    rows = model.vocab // piece.mesh.tp + piece.tokens * (piece.wide > piece.itemsize)
    lookup = rows * model.hidden * piece.wide
    kv = len(layers) * attention_shape(model, piece).keys_values if piece.slices > 1 else 0
    end_backward = sequence(allocate(end.deferred - end.reused), allocate(end.reused - end.saved))
    forward = {
        "none": sequence(allocate(copy), *(layer.forward for layer in layers), allocate(end.saved)),
        **{
            mode: sequence(
                allocate(copy),
                *(sequence(layer.forward, allocate(-layer.totals.recomputable[mode])) for layer in layers),
                allocate(end.saved),
            )
            for mode in ("selective", "attention")
        },
        "full": sequence(
            *(sequence(layer.forward, allocate(-layer.totals.saved)) for layer in layers),
            allocate(2 * stream + end.saved),
            allocate(-2 * stream - end.saved),
            allocate(0 if first else stream),
        ),
    }
    blocks = [(end_backward, end.deferred, lookup if model.mtp_layers and last else 0)]
    blocks += [(layer.backward, layer.totals.deferred, layer.totals.weight) for layer in reversed(layers)]
    blocks.append((allocate(-copy), 0, 0))
    blocks.append((allocate(embedding.deferred), embedding.deferred, lookup if first else 0))
    return StageActivations(
        saved=copy + sum(part.saved for part in parts),
        not_offloadable=sum(part.not_offloadable for part in parts),
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
    """Of a custom model's layers, which run on meta tensors to be counted."""
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
        forward={"none": allocate(saved), "full": Effect(received, found.layer)},
        backward=Effect(found.deferred - saved, most - saved),
        weight=Effect(-found.deferred, 0),
        backward_and_weight=Effect(-saved, most - saved),
    )


def activations_of(plan: Plan, stage: int) -> StageActivations:
    return stage_activations(plan.model, plan.layers, stage, piece_of(plan))


class ActivationPeak(NamedTuple):
    """Bytes on a rank's device, and offloaded to its host."""

    device: int
    host: int


def activation_peaks(plan: Plan, rank: int) -> ActivationPeak:
    """Of a rank of the mesh over all programs of a plan, which run one after another."""
    peaks = [activation_peak(plan, program, rank) for program in plan.programs]
    return ActivationPeak(*map(max, zip(*peaks, strict=True)))


def activation_peak(plan: Plan, program: Program, rank: int) -> ActivationPeak:
    """Of a rank of the mesh in one of the plan's programs."""
    walk = Walk(plan, program, plan.mesh.coordinates(rank).pp)
    for instruction in instructions_of(program.streams[walk.rank]):
        if instruction.op in OPS:
            walk.run(instruction)
    on_host, on_device = arena(program, walk.rank, slots_of(plan)).bytes
    return ActivationPeak(walk.peak + on_device, on_host)


class Walk:
    """Applies the effects of a stream's instructions. A result stays until it is sent, or until the next stage reads it
    if that is on the same rank."""

    def __init__(self, plan: Plan, program: Program, rank: int) -> None:
        self.plan, self.program, self.rank, self.slices = plan, program, rank, program.slices
        self.stages = {stage: activations_of(plan, stage) for stage in program.placement[rank]}
        self.cuts = cuts_of(plan)
        self.held = self.peak = 0

    def run(self, at: Instruction) -> None:
        stage, mode = self.stages[at.stage], self.plan.recompute_mode(at.stage)
        is_first_slice, is_last_slice = at.microbatch % self.slices == 0, (at.microbatch + 1) % self.slices == 0
        if at.op is not Op.RELOAD:
            self._release(at.waits)
        input_in_slot = 0 if at.stage == 0 or self._is_local(at, -1) else stage.input
        incoming_in_slot = 0 if self._is_local(at, 1) else stage.incoming
        match at.op:
            case Op.F:
                self._apply(allocate(is_first_slice * stage.kv_cache))
                received, result = self._local_stream(at, -1), self._local_stream(at, 1)
                if self.program.forward_only:
                    effect = Effect(-is_last_slice * stage.kv_cache, stage.forward["full"].peak - input_in_slot)
                else:
                    effect = stage.forward[mode].without(input_in_slot)
                self._apply(sequence(allocate(-received), allocate(result), effect))
            case Op.RECOMPUTE:
                made = stage.saved - stage.kept(mode)
                self._apply(Effect(made, made + stage.recompute))
            case Op.RELOAD:
                self._apply(allocate(self.cuts[at.stage].taken))
            case Op.B | Op.BW:
                self._apply(allocate(is_last_slice * stage.kv_gradients))
                received, result = self._local_stream(at, 1), self._local_stream(at, -1)
                effect = stage.backward if at.op is Op.B else stage.backward_and_weight
                held = effect.held + input_in_slot - (incoming_in_slot if at.op is Op.B else 0)
                effect = Effect(held, effect.peak - incoming_in_slot)
                self._apply(sequence(allocate(-received), allocate(result), effect))
                self._apply(allocate(-is_first_slice * (stage.kv_cache + stage.kv_gradients)))
            case Op.W:
                self._apply(stage.weight)
                self.held += incoming_in_slot

    def _release(self, waits: Sequence[Key]) -> None:
        """Frees what the OFFLOADs that an instruction waits for have copied."""
        self.held -= sum(self.cuts[key.stage].taken for key in waits if key.op is Op.OFFLOAD)

    def _apply(self, effect: Effect) -> None:
        self.peak = max(self.peak, self.held + effect.peak)
        self.held += effect.held

    def _local_stream(self, at: Instruction, step: int) -> int:
        """Bytes of the stream to or from a neighbouring stage, if that is on this rank."""
        return self.stages[at.stage].input if self._is_local(at, step) else 0

    def _is_local(self, at: Instruction, step: int) -> bool:
        return self.program.compute_rank.get((at.stage + step, at.microbatch)) == self.rank
