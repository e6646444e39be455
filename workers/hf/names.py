"""Names of Hugging Face files and tensors, and which of those tensors each of pentad's consists of.

A tensor of pentad is several of the files' concatenated in C order: queries, keys and values; gate and up; expert after
expert. So each form can be streamed from the other with one file tensor in memory. The rotary parts of DeepSeek-V3 are
interleaved in files (pair i is x[2 i], x[2 i + 1]) and half-split in pentad.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pentad.schedules.spec.model import MLA, Experts, ModelSpec

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_FILE = "model.yaml"  # the model section that an import writes
# Copied unchanged by import and export.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
)

Sizes = tuple[int, ...]


class Rotary(NamedTuple):
    """Rows in `heads` equal groups, in each of which the last `width` rows are interleaved rotary pairs."""

    heads: int
    width: int


class FileTensor(NamedTuple):
    """A tensor in the files."""

    name: str
    shape: Sizes
    rotary: Rotary | None = None


class Entry(NamedTuple):
    """A tensor of pentad by its global name, and the file tensors whose elements it consists of, in order."""

    name: str
    shape: Sizes
    parts: tuple[FileTensor, ...]


class TensorTable(NamedTuple):
    """All tensors of a model. `copies` maps file tensors that repeat another one to that one; the files of models with
    tied embeddings may lack them. `zeros` are in files only: expert biases that this model does not have."""

    entries: tuple[Entry, ...]
    copies: dict[str, str]
    zeros: tuple[FileTensor, ...]


class Layout(NamedTuple):
    """How files store a family: `fused_experts` in one tensor as transformers 5 holds them in memory, else one each as
    on the hub; `interleaved` rotary parts as DeepSeek-V3 unless its config.json says no."""

    fused_experts: bool = False
    interleaved: bool = True


def tensor_table(family: str, model: ModelSpec, layout: Layout = Layout()) -> TensorTable:  # noqa: B008 (a constant)
    """The tensors of a model, layer by layer, then embedding, norm and head."""
    entries: list[Entry] = []
    num_layers = model.layers + model.mtp_layers
    for layer in range(num_layers):
        entries += _layer(family, model, layer, layout)
    vocab_shape = (model.vocab, model.hidden)
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    entries.append(_single("embedding", "model.embed_tokens.weight", vocab_shape))
    entries.append(_single("norm", "model.norm.weight", (model.hidden,)))
    if not model.tie_word_embeddings:
        entries.append(_single("head", head, vocab_shape))
    copies = {"lm_head.weight": head} if model.tie_word_embeddings else {}
    for layer in range(model.layers, num_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    zeros: list[FileTensor] = []
    if family == "deepseek-v3" and model.experts is not None and not model.experts.bias_update_rate:
        for layer in range(model.experts.first_k_dense, num_layers):
            bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            zeros.append(FileTensor(bias, (model.experts.num_experts,)))
    return TensorTable(tuple(entries), copies, tuple(zeros))


def _layer(family: str, model: ModelSpec, layer: int, layout: Layout) -> Iterator[Entry]:
    ours, hf, hidden = f"layers.{layer}", f"model.layers.{layer}", model.hidden
    yield _single(f"{ours}.attention_norm", f"{hf}.input_layernorm.weight", (hidden,))
    if model.mla is None:
        yield from _attention(model, f"{ours}.attention", f"{hf}.self_attn")
    else:
        yield from _mla(model, model.mla, f"{ours}.attention", f"{hf}.self_attn", layout)
    yield _single(f"{ours}.mlp_norm", f"{hf}.post_attention_layernorm.weight", (hidden,))
    if model.experts is None or layer < model.experts.first_k_dense:
        yield from _mlp(f"{ours}.mlp", f"{hf}.mlp", hidden, model.ffn)
    else:
        yield from _experts(family, model.experts, hidden, ours, hf, layout)
    if layer >= model.layers:
        yield from _mtp(model, layer - model.layers, hf)


def _attention(model: ModelSpec, ours: str, hf: str) -> Iterator[Entry]:
    head_dim, hidden = model.qk_head_dim, model.hidden
    rows = {"q": model.heads * head_dim, "k": model.kv_heads * head_dim, "v": model.kv_heads * head_dim}
    parts = tuple(FileTensor(f"{hf}.{kind}_proj.weight", (count, hidden)) for kind, count in rows.items())
    yield Entry(f"{ours}.qkv", (sum(rows.values()), hidden), parts)
    if model.qk_norm:
        yield _single(f"{ours}.query_norm", f"{hf}.q_norm.weight", (head_dim,))
        yield _single(f"{ours}.key_norm", f"{hf}.k_norm.weight", (head_dim,))
    yield _single(f"{ours}.out", f"{hf}.o_proj.weight", (hidden, model.heads * head_dim))


def _mla(model: ModelSpec, mla: MLA, ours: str, hf: str, layout: Layout) -> Iterator[Entry]:
    hidden, heads, rope = model.hidden, model.heads, mla.qk_rope_head_dim
    query_rotary, key_rotary = (Rotary(heads, rope), Rotary(1, rope)) if layout.interleaved else (None, None)
    query_rows = heads * (mla.qk_nope_head_dim + rope)
    if mla.q_lora_rank:
        yield _single(f"{ours}.query_down", f"{hf}.q_a_proj.weight", (mla.q_lora_rank, hidden))
        yield _single(f"{ours}.query_norm", f"{hf}.q_a_layernorm.weight", (mla.q_lora_rank,))
        yield _single(f"{ours}.query", f"{hf}.q_b_proj.weight", (query_rows, mla.q_lora_rank), query_rotary)
    else:
        yield _single(f"{ours}.query", f"{hf}.q_proj.weight", (query_rows, hidden), query_rotary)
    yield _single(f"{ours}.latent", f"{hf}.kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + rope, hidden), key_rotary)
    yield _single(f"{ours}.latent_norm", f"{hf}.kv_a_layernorm.weight", (mla.kv_lora_rank,))
    up_shape = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield _single(f"{ours}.keys_values", f"{hf}.kv_b_proj.weight", up_shape)
    yield _single(f"{ours}.out", f"{hf}.o_proj.weight", (hidden, heads * mla.v_head_dim))


def _mlp(ours: str, hf: str, hidden: int, ffn: int) -> Iterator[Entry]:
    parts = tuple(FileTensor(f"{hf}.{kind}_proj.weight", (ffn, hidden)) for kind in ("gate", "up"))
    yield Entry(f"{ours}.gate_up", (2 * ffn, hidden), parts)
    yield _single(f"{ours}.down", f"{hf}.down_proj.weight", (hidden, ffn))


def _experts(family: str, experts: Experts, hidden: int, ours: str, hf: str, layout: Layout) -> Iterator[Entry]:
    count, ffn = experts.num_experts, experts.intermediate_size
    if family == "mixtral" and not layout.fused_experts:
        hf, gate, up, down = f"{hf}.block_sparse_moe", "w1", "w3", "w2"
    else:
        hf, gate, up, down = f"{hf}.mlp", "gate_proj", "up_proj", "down_proj"
    yield _single(f"{ours}.experts.router", f"{hf}.gate.weight", (count, hidden))
    if experts.bias_update_rate:
        yield _single(f"{ours}.experts.bias", f"{hf}.gate.e_score_correction_bias", (count,))
    gate_up_shape, down_shape = (count, 2 * ffn, hidden), (count, hidden, ffn)
    if layout.fused_experts:
        yield _single(f"{ours}.experts.gate_up", f"{hf}.experts.gate_up_proj", gate_up_shape)
        yield _single(f"{ours}.experts.down", f"{hf}.experts.down_proj", down_shape)
    else:
        names = [f"{hf}.experts.{expert}.{kind}.weight" for expert in range(count) for kind in (gate, up)]
        parts = tuple(FileTensor(name, (ffn, hidden)) for name in names)
        yield Entry(f"{ours}.experts.gate_up", gate_up_shape, parts)
        names = [f"{hf}.experts.{expert}.{down}.weight" for expert in range(count)]
        yield Entry(f"{ours}.experts.down", down_shape, tuple(FileTensor(name, (hidden, ffn)) for name in names))
    if experts.shared_intermediate_size:
        yield from _mlp(f"{ours}.shared", f"{hf}.shared_experts", hidden, experts.shared_intermediate_size)


def _mtp(model: ModelSpec, number: int, hf: str) -> Iterator[Entry]:
    ours, hidden = f"predicted.{number}", model.hidden
    yield _single(f"{ours}.hidden_norm", f"{hf}.hnorm.weight", (hidden,))
    yield _single(f"{ours}.embedding_norm", f"{hf}.enorm.weight", (hidden,))
    yield _single(f"{ours}.join", f"{hf}.eh_proj.weight", (hidden, 2 * hidden))
    yield _single(f"{ours}.norm", f"{hf}.shared_head.norm.weight", (hidden,))


def _single(ours: str, hf: str, shape: Sizes, rotary: Rotary | None = None) -> Entry:
    return Entry(ours, shape, (FileTensor(hf, shape, rotary),))
