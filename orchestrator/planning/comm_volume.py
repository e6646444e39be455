"""What a rank sends in a step: operations and bytes, by axis and kind of operation.

Transfers between stages and collectives of parameters and gradients are instructions. Those on tp, cp and ep run inside
F, B and RECOMPUTE and follow from the sizes of a layer. Bytes are what one rank sends in a ring algorithm: for N bytes
on n ranks, (n - 1) / n of N to gather or reduce-scatter them, and twice that to all-reduce them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from pentad.orchestrator.activations.allocations import BYTES, FP8_TILE, INDEX, Piece, piece_of, wide_bytes
from pentad.orchestrator.activations.attention_memory import attention_shape
from pentad.schedules.ir.instruction import REDUCTIONS, SENDS, Instruction, Op, instructions_of
from pentad.schedules.passes.optimizer_pass import last_reductions
from pentad.schedules.passes.recompute import PARTS, recomputed_parts
from pentad.schedules.spec.mesh import Axis
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.row_slots import num_tiles, routed_share
from pentad.schedules.spec.tensors import LayerRange
from pentad.schedules.spec.zero_layout import first_layout

WHOLE = ("F", "B", "full")  # phases that run all of a stage; others are RECOMPUTE of parts of its layers


class CommKind(NamedTuple):
    """An axis of the mesh ('dp' stands for all ranks that hold the same parameters) and a kind of operation."""

    axis: Axis
    kind: str


class Volume(NamedTuple):
    operations: int = 0
    bytes: int = 0


class CommVolume(dict[CommKind, Volume]):
    """What one rank sends."""

    def add(self, axis: Axis, kind: str, operations: int, size: int) -> None:
        if operations:
            before = self.get(CommKind(axis, kind), Volume())
            self[CommKind(axis, kind)] = Volume(before.operations + operations, before.bytes + size)

    def include(self, other: CommVolume, times: int = 1) -> None:
        for (axis, kind), volume in other.items():
            self.add(axis, kind, times * volume.operations, times * volume.bytes)


def collective_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a step's collectives of parameters and gradients, by op."""
    return {each.kind: volume.bytes for each, volume in comm_volume(plan, rank).items() if each.axis == "dp"}


def param_shards_at(plan: Plan, rank: int, stage: int) -> list[ParamShard]:
    """The parameter shards that a rank holds of a stage."""
    return [shard for shard in plan.param_shards_of(rank) if shard.stage == stage]


def _shared(plan: Plan, rank: int, instruction: Instruction) -> Iterator[ParamShard]:
    """The shards that a collective of a rank gathers or reduces. Frozen weights are only gathered, and only with
    ZeRO-3."""
    held = param_shards_at(plan, rank, instruction.stage)
    yield from (shard for shard in held if plan.num_holders(shard) > 1)
    if instruction.op is Op.ALL_GATHER:
        held = [shard for shard in plan.frozen_shards_of(rank) if shard.stage == instruction.stage]
        yield from (shard for shard in held if plan.num_zero_shards(shard) > 1)


def padded_elements(plan: Plan, shard: ParamShard) -> int:
    """The shard's elements, padded so that ZeRO cuts it into equal parts."""
    return plan.num_zero_shards(shard) * plan.zero_shard_size(shard)


def transports(plan: Plan) -> dict[str, str]:
    """What moves data, 'gloo', 'nccl' or 'peer': by axis, between stages ('pp') and inside layers; for 'parameters',
    their collectives; and for 'replicas', the sum of gradients over replicas of ZeRO's shards."""
    axes: tuple[Axis, ...] = ("pp", "cp", "tp", "ep")
    found = {str(axis): plan.transport_along(axis) for axis in axes if getattr(plan.mesh, axis) > 1}
    is_shared = any(plan.num_holders(shard) > 1 for shard in plan.param_shards)
    found |= {"parameters": plan.transport_along("dp")} if is_shared else {}
    return found | ({"replicas": "gloo" if plan.transport == "gloo" else "nccl"} if plan.zero_shards else {})


def comm_volume(plan: Plan, rank: int) -> CommVolume:
    """All that a rank sends in a step, except sums of a few bytes at its end."""
    found, piece, copied = CommVolume(), piece_of(plan), plan.transport_along("tp") == "peer"
    stream, program = piece.stream(plan.model.hidden), plan.program.streams[plan.mesh.coordinates(rank).pp]
    last = last_reductions(program)
    for instruction in instructions_of(program):
        op, stage = instruction.op, instruction.stage
        if op in SENDS:
            found.add("pp", op.value, 1, stream)
        elif op is Op.ALL_GATHER or op in REDUCTIONS:
            for shard in _shared(plan, rank, instruction):
                found.add("dp", op.value, *_collective(plan, instruction, shard))
                if op is Op.REDUCE_SCATTER and instruction.key in last:
                    found.add("dp", Op.ALL_REDUCE.value, *_sum_of_replicas(plan, shard))
        elif op in (Op.F, Op.B, Op.BW, Op.RECOMPUTE):
            mode = plan.recompute_mode(stage)
            phase = mode if op is Op.RECOMPUTE else "F" if op is Op.F else "B"
            given, is_repeated = (plan.model, plan.layers[stage], piece, phase), op is Op.F and mode == "full"
            found.include(stage_volume(*given, copied=copied, is_repeated=is_repeated))
    return found


@lru_cache(maxsize=4096)
def stage_volume(
    model: ModelSpec, layers: LayerRange, piece: Piece, phase: str, *, copied: bool = False, is_repeated: bool = False
) -> CommVolume:
    """What one piece sends on one stage: in its layers, embedding and head. `phase` is F, B or the mode of a RECOMPUTE.
    With exchanges `copied` between the GPUs of a host, the result of a product is one exchange, otherwise one a tile.
    An F that `is_repeated` by RECOMPUTE makes no gradient of chunks of logits."""
    found, plain = CommVolume(), piece._replace(fp8=None)
    alike = Counter(
        (layer >= model.dense_layers, piece.of_layer(layer, model.layers) is piece) for layer in layers.numbers
    )
    for (has_experts, is_same), count in alike.items():
        its = piece if is_same else plain
        found.include(layer_volume(model, has_experts, its, phase, copied=copied), count)
    mtp_layers = model.mtp_layers if layers.has_head and phase in WHOLE else 0
    found.include(layer_volume(model, model.experts is not None, plain, phase, copied=copied), mtp_layers)
    if piece.mesh.tp > 1 and phase in WHOLE:
        stream = piece.full_stream(model.hidden)
        embeddings, heads = (end + mtp_layers for end in (layers.has_embedding, layers.has_head))
        _add_tp(found, piece, "all_gather" if phase == "B" else "reduce_scatter", embeddings, embeddings * stream)
        chunks = piece.logit_chunks if phase != "B" else Counter()
        _add_tp(found, piece, "all_gather", heads * max(1, chunks.total()), heads * stream)
        if piece.logit_rows:
            if phase != "B" and not is_repeated:
                tiles = sum(count if copied else count * num_tiles(rows) for rows, count in chunks.items())
                _add_tp(found, piece, "reduce_scatter", heads * tiles, heads * stream)
        elif phase == "B":
            own = layers.has_head * _num_tiles(piece.of_head, copied=copied)
            tiles = own + mtp_layers * _num_tiles(plain, copied=copied)
            _add_tp(found, piece, "reduce_scatter", tiles, heads * stream)
        if phase != "B":  # log-sum-exps and targets' logits
            _add_tp(
                found,
                piece,
                "all_gather",
                heads * max(1, chunks.total()),
                heads * piece.mesh.tp * 2 * piece.tokens * piece.wide,
            )
    return found


@lru_cache(maxsize=4096)
def layer_volume(model: ModelSpec, has_experts: bool, piece: Piece, phase: str, *, copied: bool = False) -> CommVolume:
    """What one piece sends in one layer. The sublayers that read their input gather it; those that write their result
    reduce-scatter it."""
    found, is_whole = CommVolume(), phase in WHOLE
    of_rows = piece if is_whole else piece.rest  # of row-wise parts
    tiles = _num_tiles(of_rows, copied=copied)
    parts = frozenset(PARTS) if is_whole else recomputed_parts(phase)
    reads, writes = ("qkv_linear" if model.mla is None else "mla_up_proj") in parts, "attn_proj" in parts
    if piece.mesh.tp > 1:
        if model.mla is not None:
            _add_latent_attention(found, piece, of_rows, phase, model, tiles, reads=reads, writes=writes)
        else:
            _add_sublayer(found, of_rows, phase, model, tiles, reads=reads, writes=writes)
        if reads and model.qk_norm == "all_heads":  # mean squares of queries and keys
            _add_tp(found, of_rows, "all_gather", 1, of_rows.mesh.tp * 2 * of_rows.tokens * of_rows.wide)
        own, tiles = (piece if has_experts else of_rows).of_network(has_experts), 1 if has_experts else tiles
        _add_sublayer(
            found, own, phase, model, tiles, reads=("moe" if has_experts else "mlp") in parts, writes=is_whole
        )
    if piece.mesh.cp > 1:
        _add_context_parallel(found, model, piece, of_rows, phase, projects=reads, attends="core_attn" in parts)
    if is_whole and has_experts and model.experts is not None and piece.mesh.ep > 1:
        _add_expert_parallel(found, model.hidden, model.experts, piece, phase)
    return found


def waited_volume(model: ModelSpec, layers: LayerRange, piece: Piece, phase: str) -> CommVolume:
    """The part of `stage_volume` on tp that no product overlaps. Routed experts multiply the rows of all ranks, sorted,
    so only the products of a shared expert start with this rank's rows and end with them; in F they end with them only
    without ep, as otherwise they run while tokens are dispatched."""
    found, experts, is_whole = CommVolume(), model.experts, phase in WHOLE
    if experts is None or piece.mesh.tp == 1:
        return found
    mtp_layers = model.mtp_layers if layers.has_head and is_whole else 0
    count = mtp_layers + sum(layer >= model.dense_layers for layer in layers.numbers)
    has_shared, is_backward = experts.shared_intermediate_size > 0, phase == "B"
    reads = is_whole or "moe" in recomputed_parts(phase)
    gathers = 0 if has_shared else count * (reads + is_backward)
    scatters = 0 if has_shared and (is_backward or piece.mesh.ep == 1) else count * is_whole
    stream = piece.full_stream(model.hidden)
    _add_tp(found, piece, "all_gather", gathers, gathers * stream)
    _add_tp(found, piece, "reduce_scatter", scatters, scatters * stream)
    return found


def _collective(plan: Plan, instruction: Instruction, shard: ParamShard) -> Volume:
    count = plan.num_zero_shards(shard)
    if instruction.op is Op.ALL_GATHER:
        gathered, size = first_layout(plan, shard), BYTES[plan.dtype]
        return Volume(len(gathered.segments), gathered.gathered_size(size) * size // count * (count - 1))
    if instruction.op is Op.ALL_REDUCE:
        return _sum_of_replicas(plan, shard)
    return Volume(1, padded_elements(plan, shard) * (count - 1) // count * _gradient_bytes(plan))


def _sum_of_replicas(plan: Plan, shard: ParamShard) -> Volume:
    """All-reduce of a shard's gradients over the ranks that hold the same part of it; nothing if there is only one."""
    count = plan.num_holders(shard) // plan.num_zero_shards(shard)
    return Volume(int(count > 1), 2 * plan.zero_shard_size(shard) * (count - 1) // count * _gradient_bytes(plan))


def _gradient_bytes(plan: Plan) -> int:
    return BYTES["bfloat16"] if plan.bf16_reduce else wide_bytes(plan.dtype)


def _num_tiles(piece: Piece, *, copied: bool) -> int:
    """The tiles in which the result of a product is scattered: one in FP8."""
    return 1 if copied or piece.fp8 is not None else num_tiles(piece.tokens)


def _add_tp(found: CommVolume, piece: Piece, kind: str, operations: int, full: int) -> None:
    """Adds `operations` on tp that move `full` bytes in total over all ranks."""
    found.add("tp", kind, operations, full * (piece.mesh.tp - 1) // piece.mesh.tp)


def _add_sublayer(
    found: CommVolume, piece: Piece, phase: str, model: ModelSpec, tiles: int, *, reads: bool, writes: bool
) -> None:
    """A sublayer gathers its input, in B once more for W, and reduce-scatters its result, and likewise its gradient
    (arXiv 2205.05198, 4.2.2). The maxima for FP8 scales are not counted."""
    stream, values = piece.full_stream(model.hidden), piece.tokens * model.hidden
    is_cast = piece.norm_casts and model.norms != "after"
    _add_tp(found, piece, "all_gather", int(reads), values if is_cast else stream)
    if reads and is_cast and piece.fp8 is not None and piece.fp8.scaling == "block":
        _add_tp(found, piece, "all_gather", 1, values // FP8_TILE * BYTES["float32"])
    if phase == "B":
        _add_tp(found, piece, "all_gather", 1, stream)
    _add_tp(found, piece, "reduce_scatter", writes * tiles, stream)


def _add_latent_attention(
    found: CommVolume, piece: Piece, rows: Piece, phase: str, model: ModelSpec, tiles: int, *, reads: bool, writes: bool
) -> None:
    """As `_add_sublayer`, but gathers latent vectors instead of the input. The result has the tokens of `rows`."""
    hidden, mla = model.hidden, model.mla
    assert mla is not None
    token, key_values = piece.tokens * piece.itemsize, mla.kv_lora_rank + mla.qk_rope_head_dim
    queries = mla.q_lora_rank or hidden
    if phase == "B":
        _add_tp(found, piece, "all_gather", 3, token * (hidden + mla.kv_lora_rank + queries))
        _add_tp(found, piece, "reduce_scatter", 1 + tiles, token * (key_values + queries))
    else:
        _add_tp(found, piece, "all_gather", 2 * reads, token * (queries + key_values))
        _add_tp(found, piece, "reduce_scatter", tiles * writes, rows.full_stream(hidden))


def _add_context_parallel(
    found: CommVolume, model: ModelSpec, piece: Piece, of_rows: Piece, phase: str, *, projects: bool, attends: bool
) -> None:
    """`projects`: queries, keys and values are made, with MLA only those of the rows `of_rows`; `attends`: attention is
    computed."""
    cp, shape, is_backward = piece.mesh.cp, attention_shape(model, piece), phase == "B"
    if shape.is_exchanged:
        made = shape if model.mla is not None else attention_shape(model, of_rows)
        moved = shape.output * (projects or attends) + made.exchanged * piece.itemsize * projects
        found.add("cp", "all_to_all", projects + (projects or attends), moved * (cp - 1) // cp)
        return
    if not attends:
        return
    values, gradients = shape.keys_values * piece.itemsize, shape.keys_values * piece.wide
    if piece.cp_method == "ring":
        found.add("cp", "ring", cp - 1, (cp - 1) * values)
        found.add("cp", "ring", cp * is_backward, cp * is_backward * gradients)
        return
    found.add("cp", "all_gather", 1, (cp - 1) * values)
    found.add("cp", "reduce_scatter", int(is_backward), (cp - 1) * gradients)


def _add_expert_parallel(found: CommVolume, hidden: int, experts: Experts, piece: Piece, phase: str) -> None:
    """Tokens are dispatched (in FP8 if experts multiply in FP8) and results combined; choices and weights travel in F,
    the gradients of weights in B. With slots, all slots travel. Otherwise, on a GPU every rank of a group gets all
    tokens, on a CPU those for its experts, taken here as with even routing."""
    ep, slots = piece.mesh.ep, piece.expert_slots
    is_gathered = piece.device == "cuda" and not slots
    share = 1.0 if is_gathered else routed_share(experts, ep)
    tokens = (ep - 1) * slots if slots else round(piece.tokens * (ep - 1) * share)
    weights = experts.top_k * (piece.wide if phase == "B" else 2 * (INDEX if piece.dtype == "float64" else 4))
    kinds = ("all_gather", "reduce_scatter") if is_gathered else ("all_to_all", "all_to_all")
    if piece.casts_experts:  # values, then scales
        found.add("ep", kinds[0], 1, tokens * hidden)
        found.add("ep", kinds[0], 1, piece.expert_rows(tokens, hidden) - tokens * hidden)
    else:
        found.add("ep", kinds[0], 1, tokens * hidden * piece.itemsize)
    found.add("ep", kinds[1], 1, tokens * hidden * piece.itemsize)
    found.add("ep", kinds[phase == "B"], 1, tokens * weights)
    if not (is_gathered or slots) and phase != "B":  # how many tokens each rank sends
        found.add("ep", "all_to_all", 1, (ep - 1) * INDEX)
