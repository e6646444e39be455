"""How each tensor of pentad is made of tensors of Hugging Face files, and back.

A tensor of pentad is the tensors of its entry, one behind the other in C order: queries, keys and values, gate and up,
expert after expert. So either form can be streamed from the other with one tensor of the files in memory. Rotary parts
of DeepSeek-V3 are interleaved in files, pair i is (x[2 i], x[2 i + 1]), and half-split in pentad.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pentad.schedules.spec.model import Experts, ModelShape

Sizes = tuple[int, ...]


class Rotary(NamedTuple):
    """Rows that are cut into `heads` equal groups, of each of which the last `width` rows are interleaved pairs."""

    heads: int
    width: int


class Part(NamedTuple):
    """A tensor of the files."""

    name: str
    shape: Sizes
    rotary: Rotary | None = None


class Entry(NamedTuple):
    """A tensor of pentad by its global name, and what it is made of."""

    name: str
    shape: Sizes
    parts: tuple[Part, ...]


class Table(NamedTuple):
    """All tensors of a model. `copies` are tensors of the files that repeat a part of that name; files of tied models
    may lack them. `zeros` are in files only: biases of experts that this model does not use."""

    entries: tuple[Entry, ...]
    copies: dict[str, str]
    zeros: tuple[Part, ...]


class Layout(NamedTuple):
    """How files spell a family: `fused` as transformers 5 holds experts in memory, else each on its own as on the hub;
    `interleaved` as DeepSeek-V3's rotary parts are unless config.json says no."""

    fused: bool = False
    interleaved: bool = True


def table(family: str, shape: ModelShape, layout: Layout = Layout()) -> Table:  # noqa: B008 (it is a constant)
    """The names of a model, layer by layer, its ends last."""
    entries: list[Entry] = []
    for layer in range(shape.layers + shape.mtp_layers):
        entries += _layer(family, shape, layer, layout)
        if layer >= shape.layers:
            entries += _prediction(shape, layer - shape.layers)
    whole = (shape.vocab, shape.hidden)
    entries.append(_single("embedding", "model.embed_tokens.weight", whole))
    entries.append(_single("norm", "model.norm.weight", (shape.hidden,)))
    head = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
    if not shape.tie_word_embeddings:
        entries.append(_single("head", head, whole))
    copies = {"lm_head.weight": head} if shape.tie_word_embeddings else {}
    for layer in range(shape.layers, shape.layers + shape.mtp_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return Table(tuple(entries), copies, tuple(_zeros(family, shape)))


def _layer(family: str, shape: ModelShape, layer: int, layout: Layout) -> Iterator[Entry]:
    here, there, hidden = f"layers.{layer}", f"model.layers.{layer}", shape.hidden
    yield _single(f"{here}.attention_norm", f"{there}.input_layernorm.weight", (hidden,))
    attention = _attention if shape.mla is None else _latent_attention
    yield from attention(shape, f"{here}.attention", f"{there}.self_attn", layout)
    yield _single(f"{here}.mlp_norm", f"{there}.post_attention_layernorm.weight", (hidden,))
    if shape.experts is None or layer < shape.experts.first_k_dense:
        yield from _gated(f"{here}.mlp", f"{there}.mlp", hidden, shape.ffn)
    else:
        yield from _experts(family, shape.experts, hidden, here, there, layout)


def _attention(shape: ModelShape, here: str, there: str, layout: Layout) -> Iterator[Entry]:
    width, h = shape.qk_head_dim, shape.hidden
    rows = {"q": shape.heads * width, "k": shape.kv_heads * width, "v": shape.kv_heads * width}
    parts = tuple(Part(f"{there}.{kind}_proj.weight", (count, h)) for kind, count in rows.items())
    yield Entry(f"{here}.qkv", (sum(rows.values()), h), parts)
    if shape.qk_norm:
        yield _single(f"{here}.query_norm", f"{there}.q_norm.weight", (width,))
        yield _single(f"{here}.key_norm", f"{there}.k_norm.weight", (width,))
    yield _single(f"{here}.out", f"{there}.o_proj.weight", (h, shape.heads * width))


def _latent_attention(shape: ModelShape, here: str, there: str, layout: Layout) -> Iterator[Entry]:
    latent, h, n = shape.mla, shape.hidden, shape.heads
    assert latent is not None
    turned = Rotary(n, latent.qk_rope_head_dim) if layout.interleaved else None
    queries = n * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if latent.q_lora_rank:
        yield _single(f"{here}.query_down", f"{there}.q_a_proj.weight", (latent.q_lora_rank, h))
        yield _single(f"{here}.query_norm", f"{there}.q_a_layernorm.weight", (latent.q_lora_rank,))
        yield _single(f"{here}.query", f"{there}.q_b_proj.weight", (queries, latent.q_lora_rank), turned)
    else:
        yield _single(f"{here}.query", f"{there}.q_proj.weight", (queries, h), turned)
    down, turned = (latent.kv_lora_rank + latent.qk_rope_head_dim, h), turned and Rotary(1, latent.qk_rope_head_dim)
    yield _single(f"{here}.latent", f"{there}.kv_a_proj_with_mqa.weight", down, turned)
    yield _single(f"{here}.latent_norm", f"{there}.kv_a_layernorm.weight", (latent.kv_lora_rank,))
    up = (n * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    yield _single(f"{here}.keys_values", f"{there}.kv_b_proj.weight", up)
    yield _single(f"{here}.out", f"{there}.o_proj.weight", (h, n * latent.v_head_dim))


def _gated(here: str, there: str, hidden: int, ffn: int) -> Iterator[Entry]:
    parts = tuple(Part(f"{there}.{kind}_proj.weight", (ffn, hidden)) for kind in ("gate", "up"))
    yield Entry(f"{here}.gate_up", (2 * ffn, hidden), parts)
    yield _single(f"{here}.down", f"{there}.down_proj.weight", (hidden, ffn))


def _experts(family: str, experts: Experts, h: int, here: str, there: str, layout: Layout) -> Iterator[Entry]:
    count, ffn = experts.num_experts, experts.intermediate_size
    old = family == "mixtral" and not layout.fused
    there = f"{there}.block_sparse_moe" if old else f"{there}.mlp"
    gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    yield _single(f"{here}.experts.router", f"{there}.gate.weight", (count, h))
    if experts.bias_update_rate:
        yield _single(f"{here}.experts.bias", f"{there}.gate.e_score_correction_bias", (count,))
    wide, deep = (count, 2 * ffn, h), (count, h, ffn)
    if layout.fused:
        yield _single(f"{here}.experts.gate_up", f"{there}.experts.gate_up_proj", wide)
        yield _single(f"{here}.experts.down", f"{there}.experts.down_proj", deep)
    else:
        pairs = ((expert, kind) for expert in range(count) for kind in (gate, up))
        parts = tuple(Part(f"{there}.experts.{expert}.{kind}.weight", (ffn, h)) for expert, kind in pairs)
        yield Entry(f"{here}.experts.gate_up", wide, parts)
        parts = tuple(Part(f"{there}.experts.{expert}.{down}.weight", (h, ffn)) for expert in range(count))
        yield Entry(f"{here}.experts.down", deep, parts)
    if experts.shared_intermediate_size:
        yield from _gated(f"{here}.shared", f"{there}.shared_experts", h, experts.shared_intermediate_size)


def _prediction(shape: ModelShape, number: int) -> Iterator[Entry]:
    here, there, h = f"predicted.{number}", f"model.layers.{shape.layers + number}", shape.hidden
    yield _single(f"{here}.hidden_norm", f"{there}.hnorm.weight", (h,))
    yield _single(f"{here}.embedding_norm", f"{there}.enorm.weight", (h,))
    yield _single(f"{here}.join", f"{there}.eh_proj.weight", (h, 2 * h))
    yield _single(f"{here}.norm", f"{there}.shared_head.norm.weight", (h,))


def _zeros(family: str, shape: ModelShape) -> Iterator[Part]:
    experts = shape.experts
    if family == "deepseek-v3" and experts is not None and not experts.bias_update_rate:
        for layer in range(experts.first_k_dense, shape.layers + shape.mtp_layers):
            yield Part(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (experts.num_experts,))


def _single(here: str, there: str, shape: Sizes, rotary: Rotary | None = None) -> Entry:
    return Entry(here, shape, (Part(there, shape, rotary),))
