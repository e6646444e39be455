"""Tensors that OFFLOAD takes from a unit, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from pentad.orchestrator.planning import activation_memory as memory
from pentad.orchestrator.planning.allocations import Allocation, Piece, piece_of
from pentad.schedules.passes.offload_cut import Cut, cut
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange


def cuts_of(plan: Plan) -> tuple[Cut, ...]:
    """What OFFLOAD takes of one piece on each unit."""
    return cuts(plan.model, plan.layers, plan.program.stage_of, piece_of(plan), plan.recompute, plan.offload)


def cuts(
    model: ModelSpec,
    layers: Sequence[LayerRange],
    stage_of: Sequence[int],
    piece: Piece,
    modes: Sequence[str],
    fractions: Sequence[float],
) -> tuple[Cut, ...]:
    """`cuts_of` a plan with these units; without `fractions` of all their bytes. `modes` are those of recomputation."""
    found = []
    for unit, held in enumerate(layers):
        is_sent = unit > 0 and stage_of[unit - 1] != stage_of[unit]
        sizes = offloadable(model, held, piece, modes[unit] if modes else "none", is_sent=is_sent)
        found.append(cut(sizes, fractions[unit] if fractions else 1.0))
    return tuple(found)


@lru_cache(maxsize=4096)
def offloadable(model: ModelSpec, held: LayerRange, piece: Piece, mode: str, *, is_sent: bool) -> tuple[int, ...]:
    """Bytes of the tensors between F and B that can leave the device, with such recomputation. What another stage has
    sent (`is_sent`) cannot: it may lie in a receive slot."""
    stream = piece.stream(model.hidden)
    if model.custom is not None:
        return () if mode == "full" else (_custom_bytes(model, held, piece),)
    if mode == "full":
        return () if is_sent or held.has_embedding else (stream,)
    sizes = [each.bytes for each in _kept(model, held, piece, mode) if each.offload and each.life in ("F-B", "F-W")]
    if is_sent and model.norms != "after":
        sizes.remove(stream)
    return tuple(size for size in sizes if size)


def _kept(model: ModelSpec, held: LayerRange, piece: Piece, mode: str) -> Iterator[Allocation]:
    """What layers allocate and do not recompute; heads recompute nothing."""
    recomputed = {"none": (), "selective": ("selective",), "attention": ("selective", "attention")}[mode]
    for number in held.numbers:
        has_window, own = model.layer_kind(number).window > 0, piece.of_layer(number, model.layers)
        sublayers = memory.sublayers(model, number >= model.dense_layers, has_window, own)
        yield from (each for each in chain(*chain(*sublayers)) if each.recompute not in recomputed)
    if held.has_head:
        yield from memory.heads_and_mtp(model, piece._replace(fp8=None))


def _custom_bytes(model: ModelSpec, held: LayerRange, piece: Piece) -> int:
    import torch

    from pentad.workers.custom.inspect import activation_bytes

    assert model.custom is not None
    rows = piece.tokens // model.custom.length
    return activation_bytes(model.custom, *held[:2], model.hidden, rows, getattr(torch, piece.dtype)).offloadable
