"""Bytes of activations: what a piece keeps on a stage between F, B and W, and the most that a rank has at once.

Counted along the rank's own stream: what instructions make, keep, hand on and free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add

from pentad.orchestrator.planning.activation_memory import Half, Piece, attention, experts, gated, latent, piece_of
from pentad.orchestrator.planning.endings import End, ahead, head, looked
from pentad.schedules.ir.instruction import Instruction, Op, units_of
from pentad.schedules.spec.model import CustomModel, ModelShape
from pentad.schedules.spec.plan import Plan

BACKWARD = (Op.B, Op.BW)
MOVING = (Op.F, Op.B, Op.W, Op.BW, Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD)


@dataclass(frozen=True)
class Shares:
    """Bytes of one piece on one stage.

    `roots` and `leaves` are what B needs of F, of all layers, as a stage with selective recompute tells them apart (the
    head's are roots); `still` is the part of the roots that no OFFLOAD takes; `entry` is one residual stream, which is
    no more of it where it lies in the slot of a transfer. `deferred` is what W needs of B, of which `given` is the
    gradient that B got, which may lie in a slot too. `room` and `gradients` are shared by the slices of a microbatch.

    The most that is there at once: `forward` while F keeps all, `light` while it keeps nothing, `backward` during B and
    `fused` during BW, what they have freed so far left out, `weight` besides what W needs.
    """

    roots: int
    leaves: int
    still: int
    entry: int
    deferred: int
    given: int
    room: int
    gradients: int
    forward: int
    light: int
    backward: int
    fused: int
    weight: int

    @property
    def saved(self) -> int:
        return self.roots + self.leaves


@lru_cache(maxsize=4096)
def layer_shares(model: ModelShape, has_experts: bool, piece: Piece) -> tuple[Half, Half, int]:
    """Attention and feed-forward half of a layer, and bytes of one residual stream."""
    first = attention(model, piece) if model.mla is None else latent(model, model.mla, piece)
    if has_experts and model.experts is not None:
        return first, experts(model.hidden, model.experts, piece), piece.part * model.hidden * piece.compute
    return first, gated(model.hidden, model.ffn, piece), piece.part * model.hidden * piece.compute


@dataclass(frozen=True)
class Layer:
    """Bytes of one piece in one layer; see `Half`. `forward` and `backward` are the most during F and B that is neither
    kept before nor left behind."""

    roots: int
    leaves: int
    still: int
    deferred: int
    shared: int
    given: int
    forward: int
    backward: int
    weight: int
    pairs: int


@lru_cache(maxsize=4096)
def layer_of(model: ModelShape, has_experts: bool, piece: Piece) -> Layer:
    """Two halves, each behind a norm whose input and result are kept and whose gradient waits for W."""
    first, second, stream = layer_shares(model, has_experts, piece)
    scales, norms = 2 * piece.part * piece.main, 2 * model.hidden * piece.main
    early = second.deferred - second.shared + second.backward  # before attention has its turn
    late = first.deferred - first.shared + second.deferred - second.shared + norms + first.backward + stream
    return Layer(
        roots=2 * stream + scales + first.roots + second.roots,
        leaves=2 * stream + first.leaves + second.leaves,
        still=scales + first.still + second.still,
        deferred=first.deferred + second.deferred + norms,
        shared=first.shared + second.shared,
        given=second.given,
        # the branch that came in, and what attention gives
        forward=2 * stream + max(first.forward - second.leaves - second.roots - stream, second.forward),
        backward=max(early, late),
        weight=max(first.weight, second.weight),
        pairs=first.pairs,
    )


def shares(model: ModelShape, layers: Sequence[tuple[int, int]], stage: int, piece: Piece) -> Shares:
    if model.custom is not None:
        return _own_shares(model, model.custom, layers[stage], piece)
    return _shares(model, layers[stage], stage == 0, stage == len(layers) - 1, piece)


@lru_cache(maxsize=4096)
def _shares(model: ModelShape, span: tuple[int, int], first: bool, last: bool, piece: Piece) -> Shares:
    dense = 0 if model.experts is None else model.experts.first_k_dense
    each = [layer_of(model, model.experts is not None and number >= dense, piece) for number in range(*span)]
    stream, words = piece.part * model.hidden * piece.compute, model.vocab // piece.mesh.tp
    end = _end(model, piece) if last else End()
    lookup = looked(model, piece) if first else 0
    saved, deferred = [of.roots + of.leaves for of in each], [of.deferred for of in each]
    below, above = list(accumulate(saved)), list(accumulate(reversed(deferred), initial=0))[-2::-1]
    during = [kept + of.backward for of, kept in zip(each, below, strict=True)]
    # the embedding's gradient is made whole, in the width of the main one
    wide = (words + piece.tokens * (piece.main > piece.compute)) * model.hidden * piece.main
    reads = first or (last and model.mtp_layers > 0)
    # what W of BW finds: it follows at once, or when operations of the layer before are under way
    behind = [*deferred[1:], end.deferred] if piece.is_late else [0] * len(each)
    after = [kept - own + left + of.weight for of, kept, own, left in zip(each, below, saved, deferred, strict=True)]
    ending = below[-1] + end.deferred + max(end.roots - end.shared, wide if last and model.mtp_layers else 0)
    pairs = sum(of.pairs for of in each) if piece.slices > 1 else 0
    return Shares(
        roots=sum(of.roots for of in each) + end.roots,
        leaves=sum(of.leaves for of in each),
        still=sum(of.still for of in each) + end.still,
        entry=stream,
        deferred=sum(deferred) + end.deferred + lookup,
        given=0 if last else each[-1].given,
        room=piece.slices * pairs * piece.compute,
        gradients=(piece.slices - 1) * pairs * piece.main,
        forward=max(sum(saved) + end.roots, *(kept + of.forward for of, kept in zip(each, below, strict=True))),
        light=max(*(of.roots + of.leaves + of.forward for of in each), end.roots + 2 * stream),
        backward=max(ending, *map(add, during, [more + end.deferred for more in above]), sum(deferred) + lookup),
        fused=max(ending, *map(add, during, behind), *after, lookup + wide if first else 0),
        weight=max(wide if reads else 0, *(of.weight for of in each)),
    )


def _own_shares(model: ModelShape, own: CustomModel, span: tuple[int, int], piece: Piece) -> Shares:
    """Of a user's own layers: what they keep is counted on tensors without values."""
    import torch  # a model of the user's own is made of it

    from pentad.workers.custom.memory import bytes_of

    found = bytes_of(own, *span, model.hidden, piece.tokens // own.length, getattr(torch, piece.dtype))
    entry = piece.tokens * model.hidden * piece.compute if span[0] else 0
    saved, still = found.kept + entry, found.kept - found.movable
    most = max(saved, found.deferred)
    return Shares(saved, 0, still, entry, found.deferred, 0, 0, 0, saved, found.layer, most, most, 0)


def _end(model: ModelShape, piece: Piece) -> End:
    of = layer_of(model, model.experts is not None, piece)
    layer = End(of.roots + of.leaves, of.still, of.deferred, of.shared)
    return head(model, piece).plus(ahead(model, piece, layer), model.mtp_layers)


def shares_of(plan: Plan, stage: int) -> Shares:
    return shares(plan.model, plan.layers, stage, piece_of(plan))


def peaks(plan: Plan, rank: int) -> tuple[int, int]:
    """Most bytes that a rank of the mesh has at once on its device, and on the host."""
    walk = _Walk(plan, plan.mesh.coordinates(rank).pp)
    for part in units_of(plan.program.streams[walk.rank]):
        if part.op in MOVING:
            walk.run(part)
    return walk.peak, walk.most_away


class _Walk:
    """Takes a stream part by part: F keeps some, B trades them for what W needs, W frees those.

    RECOMPUTE makes what F did not keep; OFFLOAD takes what it can to the host. A result is there until the next stage
    of the same rank keeps it, or for a moment until it is sent.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.slices = plan, rank, plan.program.slices
        self.shares = {stage: shares_of(plan, stage) for stage in plan.program.placement[rank]}
        self.held = self.peak = self.away = self.most_away = 0

    def run(self, part: Instruction) -> None:
        of, mode = self.shares[part.stage], self.plan.mode(part.stage)
        here = of.entry if part.stage == 0 or self._is_own(part, -1) else 0
        whole = of.saved - of.entry + here
        light = {"none": whole, "selective": whole - of.leaves, "full": here if part.stage else 0}[mode]
        self._share(part, of)
        match part.op:
            case Op.F:
                self._keep(-of.entry if self._is_own(part, -1) else 0)
                most = of.light if mode == "full" else light + of.forward - of.saved
                self._keep(light + self._result(part, 1, of), max(0, most - light))
            case Op.RECOMPUTE:
                self._keep(whole - light, max(0, of.forward - of.saved))
            case Op.OFFLOAD | Op.RELOAD:
                sign = 1 if part.op is Op.OFFLOAD else -1
                moved = sign * (whole - of.still - here)
                self._keep(-moved)
                self.away += moved
                self.most_away = max(self.most_away, self.away)
            case Op.B | Op.BW:
                self._backward(part, of, whole)
            case Op.W:
                self._keep(0, of.weight)
                self._keep(-self._deferred(part, of))
        if part.microbatch % self.slices == 0 and part.op in BACKWARD:
            self._keep(-of.room - of.gradients)

    def _backward(self, part: Instruction, of: Shares, whole: int) -> None:
        """B needs all that F kept for its last layer, and less and less for those before."""
        self._keep(-of.entry if self._is_own(part, 1) else 0)
        deferred = self._deferred(part, of)
        most = of.fused if part.op is Op.BW else of.backward
        left = 0 if part.op is Op.BW else deferred
        most -= of.saved - whole + of.deferred - deferred
        self._keep(left + self._result(part, -1, of) - whole, max(0, most - left))

    def _share(self, part: Instruction, of: Shares) -> None:
        """What slices of a microbatch have in common comes with the first of them."""
        first, last = part.microbatch % self.slices == 0, (part.microbatch + 1) % self.slices == 0
        self._keep(of.room * (first and part.op is Op.F) + of.gradients * (last and part.op in BACKWARD))

    def _deferred(self, part: Instruction, of: Shares) -> int:
        """The gradient that B got stays in its slot, if it came in one."""
        return of.deferred if self._is_own(part, 1) else of.deferred - of.given

    def _keep(self, more: int, besides: int = 0) -> None:
        """Keeps more from now on, and something besides for a moment."""
        self.held += more
        self.peak = max(self.peak, self.held + besides)

    def _result(self, part: Instruction, step: int, of: Shares) -> int:
        """What waits for the neighbouring stage, if that is on this rank."""
        return of.entry if self._is_own(part, step) else 0

    def _is_own(self, part: Instruction, step: int) -> bool:
        """Whether what an instruction got is the result of a neighbouring stage on this rank."""
        return self.plan.program.home.get((part.stage + step, part.microbatch)) == self.rank
