"""The parameters of a model by their global names, and how the axes of a mesh split them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Literal, NamedTuple

from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import MLA, CustomModel, Experts, Fp8Spec, ModelSpec

Range = tuple[int, int]
# Matrices whose products are in 8 bits (see Fp8Spec).
IN_8_BITS = ("attention.qkv", "attention.query", "attention.keys_values", "attention.out", "mlp.gate_up", "mlp.down")

SHARED_IN_8_BITS = ("shared.gate_up", "shared.down")
EXPERTS_IN_8_BITS = ("experts.gate_up", "experts.down")
TILE_ELEMENTS = 128 * 128  # parts of matrices in 8 bits are multiples of this
HEAD = "head"  # the output head, even where it is the embedding


class LayerRange(NamedTuple):
    """Consecutive decoder layers `first` to `end` (exclusive), perhaps none, with what is held beside them: the
    embedding, or the last norm, the head and the layers of multi-token prediction."""

    first: int
    end: int
    has_embedding: bool = False
    has_head: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first, self.end)

    def __str__(self) -> str:
        """As in 'embed 0-3 head'."""
        layers = f"{self.first}-{self.end - 1}" if len(self.numbers) > 1 else str(self.first) if self.numbers else ""
        return " ".join(each for each in ("embed" * self.has_embedding, layers, "head" * self.has_head) if each)


class Segment(NamedTuple):
    """`size` consecutive rows or columns of a tensor, made of `units` equal units that stay in one piece (heads)."""

    size: int
    units: int


class Split(NamedTuple):
    """How a mesh axis splits a dimension of a tensor: each segment evenly, by whole units.

    With fewer units than ranks, neighbouring ranks hold the same unit.
    """

    axis: Literal["tp", "ep"]
    dim: int
    segments: tuple[Segment, ...]

    def ranges(self, parts: int, index: int) -> list[Range]:
        """The ranges that rank `index` of `parts` holds, one per segment."""
        ranges, offset = [], 0
        for segment in self.segments:
            distinct = min(segment.units, parts)
            width = segment.size // distinct
            start = offset + index * distinct // parts * width
            ranges.append((start, start + width))
            offset += segment.size
        return ranges


class Tensor(NamedTuple):
    """A parameter. A dimension without a split is whole on every rank.

    `scale` is the standard deviation of the initial values, or with `is_uniform` their largest magnitude; 0 means that
    all are `constant`. Tensors with `experts` are held by one ep coordinate only. `tied_to` names the tensor of another
    stage that this one is a copy of (tied embeddings).
    """

    name: str
    shape: tuple[int, ...]
    scale: float
    splits: tuple[Split, ...] = ()
    experts: bool = False
    tied_to: str = ""
    constant: float = 1.0
    is_uniform: bool = False

    def ranges(self, mesh: Mesh, rank: int) -> list[list[Range]]:
        """By dimension: the ranges that a rank holds."""
        at, ranges = mesh.coordinates(rank), [[(0, size)] for size in self.shape]
        for split in self.splits:
            ranges[split.dim] = split.ranges(getattr(mesh, split.axis), getattr(at, split.axis))
        return ranges

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of a rank's part, the same on all ranks."""
        shape = [*self.shape]
        for split in self.splits:
            shape[split.dim] = sum(end - start for start, end in split.ranges(getattr(mesh, split.axis), 0))
        return tuple(shape)


def all_layers(model: ModelSpec) -> LayerRange:
    """All layers."""
    return LayerRange(0, model.layers, True, True)


def tensors(model: ModelSpec, layers: LayerRange | None = None) -> list[Tensor]:
    """The tensors of these layers, or of the whole model.

    Vectors (norms) come first, matrices [out, in] after them: only matrices have weight decay, and the backward pass
    finishes the last ones first.
    """
    layers = layers or all_layers(model)
    found = list(_decoder(model, layers) if model.custom is None else _custom(model.custom, layers))
    return [tensor for tensor in found if len(tensor.shape) < 2] + [tensor for tensor in found if len(tensor.shape) > 1]


@lru_cache(maxsize=4096)
def num_parameters(model: ModelSpec, layers: LayerRange | None = None) -> int:
    """Number of parameters of these layers, or of the whole model."""
    return sum(math.prod(tensor.shape) for tensor in tensors(model, layers))


def active_parameters(model: ModelSpec, layer: int) -> int:
    """Parameters of a decoder layer that one token uses: of the experts only the top_k that it visits."""
    if model.custom is not None:
        return num_parameters(model, LayerRange(layer, layer + 1))
    sizes = [(math.prod(tensor.shape), tensor.experts) for tensor in _layer(model, layer)]
    visited = sum(size for size, experts in sizes if experts)
    if model.experts is not None:
        visited = visited * model.experts.top_k // model.experts.num_experts
    return visited + sum(size for size, experts in sizes if not experts)


def fp8_matrices(model: ModelSpec, fp8: Fp8Spec, layers: Iterable[int], *, has_head: bool = False) -> Iterator[Tensor]:
    """The matrices of these layers, and of the output head, whose products are in 8 bits."""
    for layer in layers:
        if fp8.covers(layer, model.layers):
            names = IN_8_BITS + fp8.experts * EXPERTS_IN_8_BITS + fp8.shared_experts * SHARED_IN_8_BITS
            yield from (tensor for tensor in _layer(model, layer) if tensor.name.endswith(names))
    if has_head and fp8.head:
        end = LayerRange(model.layers, model.layers, has_head=True)
        yield from (tensor for tensor in tensors(model, end) if tensor.name == HEAD)


@lru_cache(maxsize=4096)
def gathered_in_8_bits(model: ModelSpec, fp8: Fp8Spec | None, layers: LayerRange, *, experts: bool) -> frozenset[str]:
    """The names of the matrices of these layers, of `experts` or all others, that ZeRO-3 gathers in 8 bits."""
    if fp8 is None or not fp8.gathers:
        return frozenset()
    found = fp8_matrices(model, fp8, layers.numbers)
    return frozenset(tensor.name for tensor in found if tensor.experts is experts)


def layers_of_sizes(sizes: Sequence[int], *, has_ends: bool = True) -> tuple[LayerRange, ...]:
    """The layers of stages of which stage s has `sizes[s]`; with `has_ends`, the first has the embedding, the last the
    head."""
    last, borders = len(sizes) - 1, pairwise(accumulate(sizes, initial=0))
    return tuple(
        LayerRange(*each, has_ends and stage == 0, has_ends and stage == last) for stage, each in enumerate(borders)
    )


def head_in_layers(model: ModelSpec, length: int) -> float:
    """FLOPs of the output head and the multi-token prediction layers, relative to one decoder layer, at a sequence
    length (causal attention)."""
    attended = model.attended_length(model.layers - 1, length)
    layer = active_parameters(model, model.layers - 1) + attended * model.heads * model.qk_head_dim
    head = model.vocab * model.hidden / layer
    return head + model.mtp_layers * (1 + head)


def _decoder(model: ModelSpec, layers: LayerRange) -> Iterator[Tensor]:
    tied, has_embedding = model.tie_word_embeddings, layers.has_embedding
    if has_embedding:
        yield _embedding(model, "embedding")
    for layer in layers.numbers:
        yield from _layer(model, layer)
    if layers.has_head:
        if not tied or not has_embedding:
            yield _embedding(model, "head", tied_to="embedding" if tied else "")
        yield _norm(model, "norm", model.hidden)
        yield from _mtp(model, has_embedding=has_embedding or tied)


def _mtp(model: ModelSpec, *, has_embedding: bool) -> Iterator[Tensor]:
    """Multi-token prediction layers; on a stage without the embedding they need a copy of it."""
    h = model.hidden
    for number in range(model.mtp_layers):
        at = f"mtp.{number}"
        yield Tensor(f"{at}.join", (h, 2 * h), 0.02)
        for name in ("hidden_norm", "embedding_norm", "norm"):
            yield _norm(model, f"{at}.{name}", h)
        yield from _layer(model, model.layers + number)
    if model.mtp_layers and not has_embedding:
        yield _embedding(model, "mtp.embedding", tied_to="embedding")


def _embedding(model: ModelSpec, name: str, tied_to: str = "") -> Tensor:
    """One row per token of the vocabulary."""
    splits = (_split_rows(model.vocab, model.vocab),)
    return Tensor(name, (model.vocab, model.hidden), 0.02, splits, tied_to=tied_to)


def _custom(custom: CustomModel, layers: LayerRange) -> Iterator[Tensor]:
    """The user's file makes their initial values, so `scale` is not used."""
    for number in layers.numbers:
        yield from (Tensor(f"layers.{number}.{name}", shape, 0.0) for name, shape in custom.layers[number].tensors)


def _layer(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    at, h = f"layers.{layer}", model.hidden
    deep = 0.02 / math.sqrt(2 * model.layers)  # of products that add to the residual stream
    if model.mla is None:
        yield from _attention(model, f"{at}.attention", deep)
    else:
        yield from _mla(model, model.mla, f"{at}.attention", deep)
    if model.experts is None or layer < model.experts.first_k_dense:
        yield from _mlp(f"{at}.mlp", h, model.ffn, deep)
    else:
        yield from _experts(model.experts, at, h, deep)
        if model.expert_biases:
            yield from _expert_biases(model.experts, at, h)
    suffixes = {"before": ("norm",), "after": ("post_norm",), "both": ("norm", "post_norm")}[model.norms]
    for sublayer, suffix in product(("attention", "mlp"), suffixes):
        yield _norm(model, f"{at}.{sublayer}_{suffix}", h)


def _attention(model: ModelSpec, at: str, deep: float) -> Iterator[Tensor]:
    h, d, n, m = model.hidden, model.qk_head_dim, model.heads, model.kv_heads
    qkv = Segment(n * d, n), Segment(m * d, m), Segment(m * d, m)
    yield Tensor(f"{at}.qkv", ((n + 2 * m) * d, h), 0.02, (Split("tp", 0, qkv),))
    yield Tensor(f"{at}.out", (h, n * d), deep, (_split_columns(n * d, n),))
    if model.qkv_bias:
        yield Tensor(f"{at}.qkv_bias", ((n + 2 * m) * d,), 0.0, (Split("tp", 0, qkv),), constant=0.0)
    if model.out_bias:
        yield Tensor(f"{at}.out_bias", (h,), 0.0, constant=0.0)
    if model.attention_sinks:
        yield Tensor(f"{at}.sinks", (n,), 0.02, (_split_rows(n, n),))
    if model.qk_norm == "head":
        yield _norm(model, f"{at}.query_norm", d)
        yield _norm(model, f"{at}.key_norm", d)
    elif model.qk_norm == "all_heads":
        yield _norm(model, f"{at}.query_norm", n * d, _split_rows(n * d, n))
        yield _norm(model, f"{at}.key_norm", m * d, _split_rows(m * d, m))


def _norm(model: ModelSpec, name: str, width: int, *splits: Split) -> Tensor:
    return Tensor(name, (width,), 0.0, splits, constant=1.0 - model.norm_offset)


def _mla(model: ModelSpec, mla: MLA, at: str, deep: float) -> Iterator[Tensor]:
    h, n = model.hidden, model.heads
    queries, keys_values = n * model.qk_head_dim, n * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank:
        yield Tensor(f"{at}.query_down", (mla.q_lora_rank, h), 0.02)
        yield _norm(model, f"{at}.query_norm", mla.q_lora_rank)
    yield Tensor(f"{at}.query", (queries, mla.q_lora_rank or h), 0.02, (_split_rows(queries, n),))
    yield Tensor(f"{at}.latent", (mla.kv_lora_rank + mla.qk_rope_head_dim, h), 0.02)
    yield _norm(model, f"{at}.latent_norm", mla.kv_lora_rank)
    yield Tensor(f"{at}.keys_values", (keys_values, mla.kv_lora_rank), 0.02, (_split_rows(keys_values, n),))
    yield Tensor(f"{at}.out", (h, n * mla.v_head_dim), deep, (_split_columns(n * mla.v_head_dim, n),))


def _mlp(at: str, hidden: int, ffn: int, deep: float) -> Iterator[Tensor]:
    yield Tensor(f"{at}.gate_up", (2 * ffn, hidden), 0.02, (Split("tp", 0, 2 * (Segment(ffn, ffn),)),))
    yield Tensor(f"{at}.down", (hidden, ffn), deep, (_split_columns(ffn, ffn),))


def _experts(experts: Experts, at: str, hidden: int, deep: float) -> Iterator[Tensor]:
    count, ffn = experts.num_experts, experts.intermediate_size
    by_expert = Split("ep", 0, (Segment(count, count),))
    yield Tensor(f"{at}.experts.router", (count, hidden), 0.02)
    shape, splits = (count, 2 * ffn, hidden), (by_expert, Split("tp", 1, 2 * (Segment(ffn, ffn),)))
    yield Tensor(f"{at}.experts.gate_up", shape, 0.02, splits, experts=True)
    shape, splits = (count, hidden, ffn), (by_expert, Split("tp", 2, (Segment(ffn, ffn),)))
    yield Tensor(f"{at}.experts.down", shape, deep, splits, experts=True)
    if experts.shared_intermediate_size:
        yield from _mlp(f"{at}.shared", hidden, experts.shared_intermediate_size, deep)


def _expert_biases(experts: Experts, at: str, hidden: int) -> Iterator[Tensor]:
    count, ffn = experts.num_experts, experts.intermediate_size
    by_expert = Split("ep", 0, (Segment(count, count),))
    yield Tensor(f"{at}.experts.router_bias", (count,), 0.0, constant=0.0)
    splits = (by_expert, Split("tp", 1, 2 * (Segment(ffn, ffn),)))
    yield Tensor(f"{at}.experts.gate_up_bias", (count, 2 * ffn), 0.0, splits, experts=True, constant=0.0)
    yield Tensor(f"{at}.experts.down_bias", (count, hidden), 0.0, (by_expert,), experts=True, constant=0.0)


def _split_rows(size: int, units: int) -> Split:
    return Split("tp", 0, (Segment(size, units),))


def _split_columns(size: int, units: int) -> Split:
    return Split("tp", 1, (Segment(size, units),))
