"""Names of tensors in torchtitan's checkpoints of its llama3 and qwen3 models without experts.

There, llama3's rotary parts are interleaved (pair i is x[2 i], x[2 i + 1]), and qwen3's are half-split.
"""

from __future__ import annotations

from collections.abc import Collection

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.hf.names import FileTensor, Rotary, TensorEntry, TensorTable, tensor_table

FAMILIES = ("llama", "qwen3")
EMBEDDING = "tok_embeddings.weight"
# Part of a name in Hugging Face's files -> in torchtitan's.
_PARTS = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Current parts -> those in releases before 2026.
_OLD_PARTS = {"attention.qkv_linear.": "attention.", "lm_head.": "output."}


def require_family(family: str) -> None:
    """Raises PentadError for a family whose tensors torchtitan stores in another form."""
    if family not in FAMILIES:
        raise PentadError(f"model.family is {family}: expected {' or '.join(FAMILIES)} for torchtitan's names")


def titan_table(family: str, model: ModelSpec, names: Collection[str] = ()) -> TensorTable:
    """The tensors of a model, under the old names if `names` are those of an old checkpoint.

    Raises PentadError for a family that torchtitan stores in another form.
    """
    require_family(family)
    old = {new: was for new, was in _OLD_PARTS.items() if names and not any(new in name for name in names)}
    heads = {"self_attn.q_proj": model.heads, "self_attn.k_proj": model.kv_heads} if family == "llama" else {}

    def renamed(name: str) -> str:
        for part, titan in (*_PARTS.items(), *old.items()):
            name = name.replace(part, titan)
        return name

    def part_of(part: FileTensor) -> FileTensor:
        count = next((count for name, count in heads.items() if name in part.name), 0)
        return FileTensor(renamed(part.name), part.shape, Rotary(count, model.qk_head_dim) if count else None)

    table = tensor_table(family, model)
    entries = (TensorEntry(entry.name, entry.shape, tuple(map(part_of, entry.parts))) for entry in table.entries)
    return TensorTable(tuple(entries), {renamed(copy): renamed(name) for copy, name in table.copies.items()})
