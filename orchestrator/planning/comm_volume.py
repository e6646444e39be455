"""What ranks send each other in a step: how often, and how many bytes, by axis and kind of operation.

Collectives of parameters and gradients and transfers between stages are instructions; those on tp, cp and ep run inside
F, B, W and RECOMPUTE, and follow from the sizes of a layer. Bytes are those that one rank sends, as rings do: of a
whole of N bytes on n ranks (n - 1) / n of N to gather or to scatter it, and both for a sum that all get.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

from pentad.orchestrator.planning.activation_memory import BYTES, INDEX, Piece, piece_of
from pentad.schedules.ir.instruction import REDUCTIONS, SENDS, Instruction, Op, instructions_of
from pentad.schedules.spec.mesh import Axis
from pentad.schedules.spec.model import MLA, Experts, ModelSpec
from pentad.schedules.spec.plan import ParamShard, Plan, aligned_part, num_tiles

Inside = Literal["F", "B", "again", "leaves"]  # `leaves`: what selective recompute does; `again`: what full does


class Flow(NamedTuple):
    """Of an axis ('dp' stands for all holders of a share) and a kind of operation."""

    axis: Axis
    kind: str


class Sent(NamedTuple):
    operations: int = 0
    bytes: int = 0

    def times(self, count: int) -> Sent:
        return Sent(count * self.operations, count * self.bytes)


class Flows(dict[Flow, Sent]):
    """Operations of one rank."""

    def add(self, axis: Axis, kind: str, operations: int, size: int) -> None:
        if operations:
            before = self.get(Flow(axis, kind), Sent())
            self[Flow(axis, kind)] = Sent(before.operations + operations, before.bytes + size)

    def include(self, other: Flows, count: int = 1) -> None:
        for (axis, kind), sent in other.items():
            self.add(axis, kind, *sent.times(count))


def traffic(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that a rank sends in a step's collectives of a stage, by op."""
    found: Counter[str] = Counter()
    for part in instructions_of(plan.program.streams[plan.mesh.coordinates(rank).pp]):
        if part.op is Op.ALL_GATHER or part.op in REDUCTIONS:
            mine = shares_at(plan, rank, part.stage)
            found[part.op.value] += sum(_of_share(plan, part, share).bytes for share in mine)
    return dict(found)


def shares_at(plan: Plan, rank: int, stage: int) -> list[ParamShard]:
    """What a rank holds of a stage."""
    return [share for share in plan.param_shards_of(rank) if share.stage == stage]


def flows(plan: Plan, rank: int) -> Flows:
    """All that a rank sends in a step but sums of a few bytes at its end."""
    found, piece = Flows(), piece_of(plan)
    stages = {stage: shares_at(plan, rank, stage) for stage in plan.stages_of(rank)}
    stream = plan.sequence_parallel_tokens * plan.model.hidden * piece.itemsize
    for part in instructions_of(plan.program.streams[plan.mesh.coordinates(rank).pp]):
        if part.op in SENDS:
            found.add("pp", part.op.value, 1, stream)
        elif part.op is Op.ALL_GATHER or part.op in REDUCTIONS:
            for share in stages[part.stage]:
                if len(plan.holders(share)) > 1:
                    found.add("dp", part.op.value, *_of_share(plan, part, share))
        elif part.op in (Op.F, Op.B, Op.BW, Op.RECOMPUTE):
            when: Inside = "F" if part.op is Op.F else "B"
            if part.op is Op.RECOMPUTE:
                when = "again" if plan.recompute_mode(part.stage) == "full" else "leaves"
            found.include(stage_flows(plan.model, plan.layers[part.stage], piece, when))
    return found


@lru_cache(maxsize=4096)
def stage_flows(model: ModelSpec, span: tuple[int, int], piece: Piece, when: Inside) -> Flows:
    """Of one piece on one stage, inside its layers and at the ends of the model."""
    found, dense = Flows(), model.experts.first_k_dense if model.experts is not None else model.layers
    for number in range(*span):
        found.include(layer_flows(model, number >= dense, piece, when))
    ahead = model.mtp_layers if span[1] == model.layers and when != "leaves" else 0
    found.include(layer_flows(model, model.experts is not None, piece, when), ahead)
    if piece.mesh.tp > 1 and when != "leaves":
        for _ in range((span[0] == 0) + ahead):
            _tensor(found, piece, "gather" if when == "B" else "scatter", 1, _stream(model, piece))
        for _ in range((span[1] == model.layers) + ahead):
            _tensor(found, piece, "gather", 1, _stream(model, piece))
            if when == "B":
                _tensor(found, piece, "scatter", num_tiles(piece.tokens), _stream(model, piece))
            else:
                _tensor(found, piece, "gather", 1, piece.mesh.tp * 2 * piece.tokens * piece.wide)
    return found


@lru_cache(maxsize=4096)
def layer_flows(model: ModelSpec, has_experts: bool, piece: Piece, when: Inside) -> Flows:
    """Of one piece in one layer."""
    found = Flows()
    if piece.mesh.tp > 1:
        if when != "leaves":
            if model.mla is None:
                _half(found, piece, when, model.hidden, num_tiles(piece.tokens))
            else:
                _narrow(found, piece, when, model.hidden, model.mla)
        _half(found, piece, when, model.hidden, 1 if has_experts else num_tiles(piece.tokens))
    if when != "leaves":
        if piece.mesh.cp > 1:
            _context(found, model, piece, when)
        if has_experts and model.experts is not None and piece.mesh.ep > 1:
            _experts(found, model.hidden, model.experts, piece, when)
    return found


def _of_share(plan: Plan, part: Instruction, share: ParamShard) -> Sent:
    """A gather is of all buckets, one operation each; a reduction is of one."""
    holders, whole = len(plan.holders(share)), plan.num_zero_shards(share) * plan.zero_shard_size(share)
    if part.op is Op.ALL_GATHER:
        return Sent(plan.buckets(share), whole * (holders - 1) // holders * BYTES[plan.dtype])
    count, size = plan.program.buckets[share.stage], max(BYTES[plan.dtype], BYTES["float32"])
    each = aligned_part(whole, count)
    mine = max(0, min(each, whole - max(0, part.microbatch) * each))
    return Sent(1, (2 if part.op is Op.ALL_REDUCE else 1) * mine * (holders - 1) // holders * size)


def _stream(model: ModelSpec, piece: Piece) -> int:
    return piece.tokens * model.hidden * piece.itemsize


def _tensor(found: Flows, piece: Piece, kind: str, operations: int, whole: int) -> None:
    """`whole` bytes in all, however many operations they take."""
    found.add("tp", kind, operations, whole * (piece.mesh.tp - 1) // piece.mesh.tp)


def _half(found: Flows, piece: Piece, when: Inside, hidden: int, tiles: int) -> None:
    """A half of a layer gathers its input, and again what its products read on the way back; its result is scattered,
    and so is its gradient."""
    stream = piece.tokens * hidden * piece.itemsize
    gathers = 2 if when == "B" else 1
    _tensor(found, piece, "gather", gathers, gathers * stream)
    if when != "leaves":
        _tensor(found, piece, "scatter", tiles, stream)


def _narrow(found: Flows, piece: Piece, when: Inside, hidden: int, of: MLA) -> None:
    """Latent attention gathers narrow vectors."""
    token, both, queries = piece.tokens * piece.itemsize, of.kv_lora_rank + of.qk_rope_head_dim, of.q_lora_rank or hidden
    if when == "B":
        _tensor(found, piece, "gather", 3, token * (hidden + of.kv_lora_rank + queries))
        _tensor(found, piece, "scatter", 1 + num_tiles(piece.tokens), token * (both + queries))
    else:
        _tensor(found, piece, "gather", 2, token * (queries + both))
        _tensor(found, piece, "scatter", num_tiles(piece.tokens), token * hidden)


def _context(found: Flows, model: ModelSpec, piece: Piece, when: Inside) -> None:
    cp, tokens, heads = piece.mesh.cp, piece.tokens, model.heads // piece.mesh.tp
    pairs = heads if model.mla is not None else max(1, model.kv_heads // piece.mesh.tp)
    query, value = model.qk_head_dim, model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    both = tokens * pairs * (query + value)
    if piece.cp_method == "ulysses":
        out, inputs = tokens * heads * value, tokens * (heads * query + max(pairs, cp) * (query + value))
        found.add("cp", "exchange", 2, (out + inputs) * piece.itemsize * (cp - 1) // cp)
        return
    back = when == "B"
    if piece.cp_method == "ring":
        found.add("cp", "ring", cp - 1, (cp - 1) * both * piece.itemsize)
        found.add("cp", "ring", cp * back, cp * back * both * piece.wide)
        return
    found.add("cp", "gather", 1, (cp - 1) * both * piece.itemsize)
    found.add("cp", "scatter", int(back), (cp - 1) * both * piece.wide)


def _experts(found: Flows, hidden: int, of: Experts, piece: Piece, when: Inside) -> None:
    """Tokens go out and results come home, with choices and weights on the way forward and weights' gradients back. On
    a GPU all ranks of a group get all tokens; on a CPU those that want them, here as many as an even choice gives."""
    ep, tokens, gathers = piece.mesh.ep, piece.tokens, piece.device == "cuda"
    reached = 1.0 if gathers else _reached(of, of.num_experts // ep)
    others = round(tokens * (ep - 1) * reached)
    small = of.top_k * (piece.wide if when == "B" else 2 * (INDEX if piece.dtype == "float64" else 4))
    row = hidden * piece.itemsize
    ways = ("gather", "scatter") if gathers else ("exchange", "exchange")
    found.add("ep", ways[0], 1, others * row)
    found.add("ep", ways[1], 1, others * row)
    found.add("ep", ways[when == "B"], 1, others * small)
    if not gathers and when != "B":  # how many there are
        found.add("ep", "exchange", 1, (ep - 1) * INDEX)


def _reached(of: Experts, held: int) -> float:
    """The share of tokens that have at least one of their experts among `held` of all."""
    none = 1.0
    for drawn in range(of.top_k):
        none *= max(0, of.num_experts - held - drawn) / (of.num_experts - drawn)
    return 1 - none
