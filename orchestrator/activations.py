"""Bytes of activations: what a piece keeps on a stage between F, B and W, and the most that a rank keeps at once.

T tokens of a piece, H hidden, A = heads x head size, K = key-value heads x head size, I ffn, V vocab, of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.instruction import Instruction, Op, units_of
from pentad.schedules.model import ModelShape, Own
from pentad.schedules.plan import Plan

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Shares:
    """Bytes of one piece on one stage.

    `roots` and `leaves` are what B needs of F, of all layers, as a stage with selective recompute tells them apart (the
    head's are roots); `still` is the part of the roots that no OFFLOAD takes; `entry` is one residual stream, which is
    no more of it where it lies in the slot of a transfer; `layer` is what one layer makes, or the head if that is more.
    `deferred` is what W needs of B. `room` and `gradients` are shared by the slices of a microbatch.
    """

    roots: int
    leaves: int
    still: int
    entry: int
    layer: int
    deferred: int
    room: int
    gradients: int

    @property
    def saved(self) -> int:
        return self.roots + self.leaves


class Layer(NamedTuple):
    """Bytes of one piece in one layer; see `Shares`."""

    roots: int
    leaves: int
    statistics: int
    deferred: int
    pairs: int  # keys and values, in elements


def shares(
    model: ModelShape,
    layers: Sequence[tuple[int, int]],
    stage: int,
    tokens: int,
    dtype: str,
    slices: int = 1,
    tp: int = 1,
) -> Shares:
    """`tokens` go through `stage` at once, on each of `tp` tensor ranks, which have a part each of the residual stream,
    the heads, the ffn and the vocabulary, but gather all of what products read."""
    if model.own is not None:
        return _own_shares(model, model.own, layers[stage], tokens, dtype)
    compute = BYTES[dtype]
    main = max(compute, BYTES["float32"])
    each = [layer_shares(model, number, tokens, compute, main, tp) for number in range(*layers[stage])]
    first, last = stage == 0, stage == len(layers) - 1
    stream, whole = tokens // tp * model.hidden * compute, tokens * model.hidden * compute
    logits = tokens * model.vocab // tp * compute
    statistics = (tokens + tokens // tp) * main
    ending = (logits + 2 * stream + statistics) if last else 0
    pairs = sum(of.pairs for of in each) if slices > 1 else 0
    return Shares(
        roots=sum(of.roots for of in each) + ending,
        leaves=sum(of.leaves for of in each),
        still=sum(of.statistics for of in each) + (statistics if last else 0),
        entry=stream,
        layer=max(*(of.roots + of.leaves for of in each), ending),
        deferred=sum(of.deferred for of in each) + (logits + whole if last else 0) + (whole if first else 0),
        room=slices * pairs * compute,
        gradients=(slices - 1) * pairs * main,
    )


def _own_shares(model: ModelShape, own: Own, layers: tuple[int, int], tokens: int, dtype: str) -> Shares:
    import torch  # a model of the user's own is made of it

    from pentad.workers.own_memory import bytes_of

    found = bytes_of(own, *layers, model.hidden, tokens // own.length, getattr(torch, dtype))
    entry = tokens * model.hidden * BYTES[dtype] if layers[0] else 0
    still = found.kept - found.movable
    return Shares(found.kept + entry, 0, still, entry, found.layer, found.deferred, room=0, gradients=0)


def layer_shares(model: ModelShape, number: int, tokens: int, compute: int, main: int, tp: int) -> Layer:
    """A layer keeps two streams, q, k, v and attention out with their statistics; two normed streams, gate and up; and
    then (x, dY) of the four products."""
    hidden, heads, ffn = model.hidden, model.heads // tp, model.ffn // tp
    wide, narrow = heads * model.head_dim, max(1, model.kv_heads // tp) * model.head_dim
    part = tokens // tp
    statistics = (2 * part + tokens * heads) * main
    return Layer(
        roots=(part * 2 * hidden + tokens * (2 * wide + 2 * narrow)) * compute + statistics,
        leaves=(part * 2 * hidden + tokens * 2 * ffn) * compute,
        statistics=statistics,
        deferred=tokens * (4 * hidden + 2 * wide + 2 * narrow + 3 * ffn) * compute,
        pairs=2 * tokens * narrow,
    )


def shares_of(plan: Plan, stage: int) -> Shares:
    sizes = plan.piece_tokens, plan.dtype, plan.program.slices, plan.mesh.tp
    return shares(plan.model, plan.layers, stage, *sizes)


def peaks(plan: Plan, rank: int) -> tuple[int, int]:
    """Most bytes that a rank of the mesh keeps at once on its device, and on the host."""
    walk = _Walk(plan, plan.mesh.coordinates(rank).pp)
    for part in units_of(plan.program.streams[walk.rank]):
        walk.run(part)
    return walk.peak, walk.most_away


class _Walk:
    """Takes a stream part by part: F keeps some, B trades them for what W needs, W frees those.

    RECOMPUTE makes what F did not keep; OFFLOAD takes what it can to the host.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.slices = plan, rank, plan.program.slices
        self.shares = {stage: shares_of(plan, stage) for stage in plan.program.placement[rank]}
        self.held = self.peak = self.away = self.most_away = 0

    def run(self, part: Instruction) -> None:
        if part.op not in (Op.F, Op.B, Op.W, Op.BW, Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD):
            return
        of, mode = self.shares[part.stage], self.plan.mode(part.stage)
        here = self._entry(part, of)
        whole = of.saved - of.entry + here
        first, last = part.microbatch % self.slices == 0, (part.microbatch + 1) % self.slices == 0
        backward = part.op in (Op.B, Op.BW)
        self._keep(of.room * (first and part.op is Op.F) + of.gradients * (last and backward))
        light = {"none": whole, "selective": whole - of.leaves, "full": here if part.stage else 0}[mode]
        match part.op:
            case Op.F:
                self._keep(light, of.layer if mode == "full" else 0)
            case Op.RECOMPUTE:
                self._keep(whole - light)
            case Op.OFFLOAD | Op.RELOAD:
                sign = 1 if part.op is Op.OFFLOAD else -1
                moved = sign * (whole - of.still - here)
                self._keep(-moved)
                self.away += moved
                self.most_away = max(self.most_away, self.away)
            case Op.B:
                self._keep(of.deferred - whole)
            case Op.W:
                self._keep(-of.deferred)
            case Op.BW:
                self._keep(-whole, of.deferred)
        if first and backward:
            self._keep(-of.room - of.gradients)

    def _keep(self, more: int, besides: int = 0) -> None:
        """Keeps more from now on, and something besides for a moment."""
        self.held += more
        self.peak = max(self.peak, self.held + besides)

    def _entry(self, part: Instruction, of: Shares) -> int:
        """What a stage received is its own to keep, unless it came from another rank, into a slot."""
        before = self.plan.program.home.get((part.stage - 1, part.microbatch), self.rank)
        return of.entry if before == self.rank else 0
