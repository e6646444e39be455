"""Slots for rows of activations: those that a rank shares with the ranks of its host, and those for experts' tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.plan import ALIGNMENT, Plan

# By axis along which ranks exchange rows inside layers: for two exchanges in flight, and the next. One for cp, where
# sequences are long: attention takes far longer than an exchange.
ROW_SLOTS: dict[Axis, int] = {"tp": 3, "cp": 1, "ep": 3}
TILE_TOKENS = 8192  # least tokens of a tile (see `num_tiles`); docs/parallelism.md has measurements
SLOT_TOKENS = 16  # slots are a multiple of this
CAPACITY = 1.5  # room for so many times the tokens that even routing sends
LARGEST_SHARE = 0.75  # of the rows that an all-gather sends between hosts: with more, ranks get all tokens instead
GROWTH = 2  # how many times more room there is after a step that had too little


def num_tiles(tokens: int) -> int:
    """The number of tiles in which tensor ranks compute a product of this many tokens: one is reduced while the next is
    computed."""
    return max(1, tokens // TILE_TOKENS)


def row_slots_size(plan: Plan) -> int:
    """Elements of all slots of a rank."""
    return sum(count * row_slot_elements(plan, axis) for axis, count in ROW_SLOTS.items())


def row_slot_elements(plan: Plan, axis: Axis) -> int:
    """Elements in the dtype of compute of each slot of an axis. 0 where its ranks communicate by NCCL or gloo."""
    if plan.transport_along(axis) != "peer":
        return 0
    sizes = plan.slice_tokens, plan.program.slices, plan.dtype
    return largest_message(axis, plan.model, plan.mesh, *sizes, plan.cp_method)


def largest_message(
    axis: Axis, model: ModelSpec, mesh: Mesh, tokens: int, slices: int, dtype: str, cp_method: CpMethod
) -> int:
    """Elements, in `dtype`, of the largest message that ranks along an axis exchange inside layers; `tokens` are those
    of one of the `slices` of a microbatch."""
    size = getattr(mesh, axis)
    if size == 1:
        return 0
    if axis == "cp":
        elements = _context_elements(model, mesh, tokens * slices, dtype, cp_method)
    elif axis == "ep":  # each rank has tokens of its own
        elements = size * tokens * model.hidden
    else:
        elements = tokens * _gathered_width(model)
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _gathered_width(model: ModelSpec) -> int:
    """The widest of a token's hidden vector and its latent vectors."""
    mla = model.mla
    return model.hidden if mla is None else max(model.hidden, mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim)


def _context_elements(model: ModelSpec, mesh: Mesh, tokens: int, dtype: str, cp_method: CpMethod) -> int:
    mla, heads = model.mla, model.heads // mesh.tp
    kv_heads = heads if mla is not None else max(1, model.kv_heads // mesh.tp)
    query, value = model.qk_head_dim, model.qk_head_dim if mla is None else mla.v_head_dim
    if cp_method == "ulysses":  # each rank gets a key-value head at least
        return tokens * (heads * query + max(kv_heads, mesh.cp) * (query + value))
    wide = 2 if dtype == "bfloat16" else 1  # gradients of keys and values are summed in float32 or wider
    senders = mesh.cp if cp_method == "all_gather" else 1
    return senders * wide * tokens * kv_heads * (query + value)


def expert_slots(share: float, tokens: int, capacity: float | None, on_host: int = 1) -> int:
    """Slots for those of a rank's `tokens` that it sends to another rank: `capacity` times the `share` of them that
    even routing sends there. None: CAPACITY times, or 0 if an all-gather sends hardly more between hosts.

    An all-gather brings a row to a host once, for all `on_host` ranks of the group there; slots bring it to each of
    them.
    """
    slots = math.ceil(tokens * share * (CAPACITY if capacity is None else capacity) / SLOT_TOKENS) * SLOT_TOKENS
    return 0 if capacity is None and slots * on_host > LARGEST_SHARE * tokens else min(tokens, slots)


@cache
def routed_share(experts: Experts, ep: int) -> float:
    """The share of tokens that at least one expert of a rank gets with even routing, if `ep` ranks have equally many
    experts: any `topk_groups` of the groups are as likely as any others, and in them any `top_k` experts."""
    size, local = experts.num_experts // experts.num_groups, experts.num_experts // ep
    allowed, chosen = experts.topk_groups * size, experts.top_k
    ranks = Counter(_local_experts(rank * local, local, size, experts.num_groups) for rank in range(ep))
    missed = 0.0  # ranks that a token does not visit
    for in_groups, count in ranks.items():
        ways = _sums_of(in_groups, experts.topk_groups)
        none = sum(number * math.comb(allowed - here, chosen) for here, number in ways.items())
        missed += count * none / (sum(ways.values()) * math.comb(allowed, chosen))
    return 1 - missed / ep


def _local_experts(first: int, count: int, size: int, groups: int) -> tuple[int, ...]:
    """How many of the `count` experts from `first` on each group of this size has, in ascending order."""
    ends = ((size * group, size * (group + 1)) for group in range(groups))
    return tuple(sorted(max(0, min(first + count, end) - max(first, start)) for start, end in ends))


def _sums_of(values: Sequence[int], chosen: int) -> Counter[int]:
    """How often each sum occurs among all choices of `chosen` values."""
    found = [Counter({0: 1}), *(Counter[int]() for _ in range(chosen))]  # by the number chosen so far
    for value in values:
        for number in range(chosen, 0, -1):
            for total, ways in found[number - 1].items():
                found[number][total + value] += ways
    return found[chosen]
