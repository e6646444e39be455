"""FLOPs and kernels of the parts of layers that RECOMPUTE can repeat (schedules/passes/recompute.py)."""

from __future__ import annotations

from pentad.schedules.passes.recompute import recomputed_parts
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import LayerRange

FORWARD_KERNELS = 9  # of a dense layer: two norms, four products, rope, attention and the gated linear unit
# For RECOMPUTE, including the norm that makes a part's input again; and for rows, to join them with those that F saved.
KERNELS = {"mlp": 2, "moe": 3, "core_attn": 1, "qkv_linear": 3, "mla_up_proj": 12, "attn_proj": 2}
KERNELS_OF_ROWS = {"mlp": 1, "qkv_linear": 3, "attn_proj": 2}


def part_kernels(model: ModelSpec, layer: int, mode: str, *, saves_rows: bool) -> int:
    """How many kernels RECOMPUTE of a layer launches, in a mode that names its parts. Norms of queries and keys, biases
    and shared experts would add some; they are not counted."""
    missing = {"qkv_linear" if model.mla else "mla_up_proj", "moe" if layer < model.dense_layers else "mlp"}
    parts = recomputed_parts(mode) - missing
    kernels = sum(KERNELS[part] + saves_rows * KERNELS_OF_ROWS.get(part, 0) for part in parts)
    return kernels - ("attn_proj" in parts and bool(parts & {"mlp", "moe"}))  # they share one norm


def part_flops(model: ModelSpec, layers: LayerRange, length: int) -> dict[str, float]:
    """Forward FLOPs by part, for each token of sequences with `length` tokens, over all these layers."""
    count, experts = len(layers.numbers), model.experts
    routed = sum(number >= model.dense_layers for number in layers.numbers)
    value = model.qk_head_dim if model.mla is None else model.mla.v_head_dim
    attended = sum(model.attended_length(number, length) for number in layers.numbers)
    flops = {
        "mlp": 4.0 * (count - routed) * model.hidden * model.ffn,
        "core_attn": attended * model.heads * (model.qk_head_dim + value),
        "attn_proj": 2.0 * count * model.hidden * model.heads * value,
    }
    if experts is not None:
        width = experts.top_k * experts.intermediate_size + experts.shared_intermediate_size
        flops["moe"] = 4.0 * routed * model.hidden * width
    projections = "qkv_linear" if model.mla is None else "mla_up_proj"
    return flops | {projections: 2.0 * count * _projections(model)}


def _projections(model: ModelSpec) -> int:
    """Elements of the matrices that make queries, keys and values in one layer."""
    hidden, heads, query, mla = model.hidden, model.heads, model.qk_head_dim, model.mla
    if mla is None:
        return hidden * (heads + 2 * model.kv_heads) * query
    queries = (hidden + heads * query) * mla.q_lora_rank if mla.q_lora_rank else hidden * heads * query
    latents = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    return queries + latents + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
