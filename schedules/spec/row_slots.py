"""Slots in which a rank shares rows of activations with the ranks of its host that share its layers."""

from __future__ import annotations

from pentad.schedules.spec.mesh import Axis
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import ALIGNMENT, Plan

# By axis whose ranks exchange rows inside layers: two exchanges in flight, and the next. One where sequences are long:
# attention takes far longer than an exchange.
ROW_SLOTS: dict[Axis, int] = {"tp": 3, "cp": 1, "ep": 3}


def row_slots_size(plan: Plan) -> int:
    """Elements of all slots of a rank."""
    return sum(count * row_slot_elements(plan, axis) for axis, count in ROW_SLOTS.items())


def row_slot_elements(plan: Plan, axis: Axis) -> int:
    """Elements in the dtype of compute of each slot of an axis: the largest message that its ranks exchange. 0 where
    they communicate by NCCL or gloo."""
    size = getattr(plan.mesh, axis)
    if size == 1 or plan.transport_along(axis) != "peer":
        return 0
    if axis == "cp":
        elements = _context_elements(plan)
    elif axis == "ep":  # each rank has tokens of its own
        elements = size * plan.slice_tokens * plan.model.hidden
    else:
        elements = plan.slice_tokens * _gathered_width(plan.model)
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _gathered_width(model: ModelSpec) -> int:
    """The widest of a token's hidden vector and its latent vectors."""
    mla = model.mla
    return model.hidden if mla is None else max(model.hidden, mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim)


def _context_elements(plan: Plan) -> int:
    model, mesh, mla = plan.model, plan.mesh, plan.model.mla
    tokens = plan.batch.micro_batch_size * plan.batch.sequence_length // mesh.cp
    heads = model.heads // mesh.tp
    kv_heads = heads if mla is not None else max(1, model.kv_heads // mesh.tp)
    query, value = model.qk_head_dim, model.qk_head_dim if mla is None else mla.v_head_dim
    if plan.cp_method == "ulysses":  # each rank gets a key-value head at least
        return tokens * (heads * query + max(kv_heads, mesh.cp) * (query + value))
    wide = 2 if plan.dtype == "bfloat16" else 1  # gradients of keys and values are summed in float32 or wider
    senders = mesh.cp if plan.cp_method == "all_gather" else 1
    return senders * wide * tokens * kv_heads * (query + value)
