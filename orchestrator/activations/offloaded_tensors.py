"""What OFFLOAD takes of the tensors that a stage saves from F to B, and which of them RECOMPUTE makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from pentad.orchestrator.activations.activation_memory import heads_and_mtp, sublayers
from pentad.orchestrator.activations.allocations import Allocation, LayerTraits, Piece, piece_of, traits_of
from pentad.schedules.ir.columns import CODE
from pentad.schedules.ir.instruction import Op
from pentad.schedules.passes.offload_cut import ALIGNMENT, Cut, cut
from pentad.schedules.passes.recompute import is_row_wise, recomputed_parts
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange

MARGIN = 1.05  # where bytes are not known
PADDING = 1 / 256  # of statistics of GPU kernels


def cuts_of(plan: Plan, units: Sequence[int] | None = None) -> tuple[Cut, ...]:
    """What OFFLOAD takes of one piece, for each unit or for each of `units`."""
    given = plan.model, plan.layers, plan.program.stage_of, piece_of(plan), plan.recompute, plan.offload
    return cuts(*given, units)


def slots_of(plan: Plan, units: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """Bytes on the host for one piece, and bytes that stay on the device of the tensor that is cut (see Plan); for each
    unit or for each of `units`.

    GPU kernels may pad statistics. Less is known of a custom model, whose kernels may save other tensors on a GPU than
    on a CPU, and of the rows of experts that exchange tokens. With data-aware groups the cut may fall on another
    tensor, of which more would stay than there is room for; that tensor then stays whole in its own memory.
    """
    found, is_custom = cuts_of(plan, units), plan.model.custom is not None and plan.device == "cuda"
    fractions = plan.offload or (1.0,) * len(plan.layers)
    is_cut = [0 < fractions[unit] < 1 for unit in (range(len(found)) if units is None else units)]
    exchanges = plan.model.experts is not None and plan.mesh.ep > 1 and plan.device == "cpu"
    if plan.batch.capacity:
        cut_slots = (int(MARGIN * each.rest) + ALIGNMENT * partial for each, partial in zip(found, is_cut, strict=True))
        return tuple((int(MARGIN * each.bytes), rest) for each, rest in zip(found, cut_slots, strict=True))
    if is_custom or exchanges:
        largest = [max(each.moved, default=0) for each in cuts_of(replace(plan, offload=()), units)]
        inexact = zip(found, largest, is_cut, strict=True)
        return tuple((int(MARGIN * each.bytes), most * partial) for each, most, partial in inexact)
    padding = PADDING if plan.device == "cuda" else 0.0
    return tuple(
        (each.bytes + int(padding * each.taken), each.rest + int(padding * each.taken) * partial)
        for each, partial in zip(found, is_cut, strict=True)
    )


def with_slots(plan: Plan) -> Plan:
    """The plan with the slots that ranks need to offload."""
    offloads = any((program.columns.op == CODE[Op.OFFLOAD]).any() for program in plan.trained_programs)
    return replace(plan, offload_slots=slots_of(plan)) if offloads else plan


def cuts(
    model: ModelSpec,
    layers: Sequence[LayerRange],
    stage_of: Sequence[int],
    piece: Piece,
    modes: Sequence[str],
    fractions: Sequence[float],
    units: Sequence[int] | None = None,
) -> tuple[Cut, ...]:
    """`cuts_of` a plan with these layers; without `fractions`, everything offloadable is taken. `modes` are the
    recomputation modes."""
    found = []
    for unit in range(len(layers)) if units is None else units:
        is_sent = unit > 0 and stage_of[unit - 1] != stage_of[unit]
        sizes = offloadable(model, layers[unit], piece, modes[unit] if modes else "none", is_sent=is_sent)
        found.append(cut(sizes, fractions[unit] if fractions else 1.0))
    return tuple(found)


def offloadable(model: ModelSpec, held: LayerRange, piece: Piece, mode: str, *, is_sent: bool) -> tuple[int, ...]:
    """Bytes of the tensors held between F and B that can leave the device, in this recomputation mode. The input that
    another stage sent (`is_sent`) cannot, as it may lie in a receive slot."""
    if mode == "full" and model.custom is None:
        return () if is_sent or held.has_embedding else (piece.stream(model.hidden),)
    if model.custom is not None:
        return () if mode == "full" else _custom_sizes(model, held, piece)
    return _offloadable(model, traits_of(model, held, piece), piece, mode, has_head=held.has_head, is_sent=is_sent)


@lru_cache(maxsize=4096)
def _offloadable(
    model: ModelSpec, kinds: Sequence[LayerTraits], piece: Piece, mode: str, *, has_head: bool, is_sent: bool
) -> tuple[int, ...]:
    kept = _kept(model, kinds, piece, mode, has_head=has_head)
    moved = (each for each in kept if each.offload and each.life in ("F-B", "F-W"))
    sizes = [size for each in moved for size in each.tensors or (each.bytes,)]
    if is_sent and model.norms != "after":
        sizes.remove(piece.stream(model.hidden))
    return tuple(size for size in sizes if size)


@lru_cache(maxsize=4096)
def row_bytes(model: ModelSpec, held: LayerRange, piece: Piece, mode: str) -> int:
    """Bytes that layers save without recomputation and that RECOMPUTE makes row by row."""
    parts, found = recomputed_parts(mode), 0
    for number in held.numbers:
        has_window, own = model.window(number) > 0, piece.of_layer(number, model.layers)
        made = chain(*chain(*sublayers(model, number >= model.dense_layers, has_window, own)))
        found += sum(each.bytes for each in made if not parts.isdisjoint(each.parts) and is_row_wise(each.parts))
    return found


def _kept(
    model: ModelSpec, kinds: Sequence[LayerTraits], piece: Piece, mode: str, *, has_head: bool
) -> Iterator[Allocation]:
    """What layers allocate and do not recompute; heads recompute nothing."""
    recomputed = recomputed_parts(mode)
    for has_experts, has_window, is_covered in kinds:
        own = piece if is_covered else piece._replace(fp8=None)
        for each in chain(*chain(*sublayers(model, has_experts, has_window, own))):
            if recomputed.isdisjoint(each.parts):
                yield each
            elif piece.saved_of(each.bytes, each.parts):
                size, *tensors = (piece.saved_of(size, each.parts) for size in (each.bytes, *each.tensors))
                yield each._replace(bytes=size, tensors=tuple(tensors))
    if has_head:
        yield from heads_and_mtp(model, piece)


def _custom_sizes(model: ModelSpec, held: LayerRange, piece: Piece) -> tuple[int, ...]:
    import torch

    from pentad.workers.custom.inspect import activation_bytes

    assert model.custom is not None
    rows = piece.tokens // model.custom.length
    return activation_bytes(model.custom, *held[:2], model.hidden, rows, getattr(torch, piece.dtype)).offloadable
