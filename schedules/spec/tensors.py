"""The parameters of a model by their global names, and how the axes of a mesh cut them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import MLA, CustomModel, Experts, ModelShape

Range = tuple[int, int]


class Run(NamedTuple):
    """`size` rows or columns side by side, in `units` equal ones that stay whole (heads)."""

    size: int
    units: int


class Cut(NamedTuple):
    """What an axis does with a dimension of a tensor: each run is cut evenly.

    Of fewer units than ranks, as many neighbours hold the same one.
    """

    axis: Literal["tp", "ep"]
    dim: int
    runs: tuple[Run, ...]

    def ranges(self, parts: int, number: int) -> list[Range]:
        """What rank `number` of `parts` holds, in order."""
        found, start = [], 0
        for run in self.runs:
            pieces = min(run.units, parts)
            width = run.size // pieces
            first = start + number * pieces // parts * width
            found.append((first, first + width))
            start += run.size
        return found


class Tensor(NamedTuple):
    """A parameter; `scale` is the standard deviation of its first value, 0 means ones. Those of `experts` are held by
    the ranks of one ep coordinate only. A dimension that is not cut is whole on every rank. `like` names the tensor of
    another stage that this one is a copy of (tied embeddings)."""

    name: str
    shape: tuple[int, ...]
    scale: float
    cuts: tuple[Cut, ...] = ()
    experts: bool = False
    like: str = ""

    def ranges(self, mesh: Mesh, rank: int) -> list[list[Range]]:
        """What a rank holds: ranges of every dimension."""
        at, found = mesh.coordinates(rank), [[(0, size)] for size in self.shape]
        for cut in self.cuts:
            found[cut.dim] = cut.ranges(getattr(mesh, cut.axis), getattr(at, cut.axis))
        return found

    def local(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of a rank's part, the same for all."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges(mesh, 0))


def tensors(model: ModelShape, first: int, end: int) -> list[Tensor]:
    """Those of decoder layers `first` to `end`, with the embedding and the head where the range touches the ends.

    Norms come first, matrices [out, in] behind them: weight decay is for matrices only, and a backward pass is done
    with the last ones first.
    """
    found = list(_all(model, first, end) if model.custom is None else _own(model.custom, first, end))
    return [each for each in found if len(each.shape) < 2] + [each for each in found if len(each.shape) > 1]


def parameters(model: ModelShape, first: int = 0, end: int | None = None) -> int:
    """How many, of a stage's layers `first` to `end` or of the whole model."""
    return sum(math.prod(each.shape) for each in tensors(model, first, model.layers if end is None else end))


def active(model: ModelShape, layer: int) -> int:
    """Parameters of a decoder layer that one token meets: of its experts those that it visits."""
    if model.custom is not None:
        return parameters(model, layer, layer + 1)
    sizes = [(math.prod(each.shape), each.experts) for each in _layer(model, layer)]
    visited = sum(size for size, experts in sizes if experts)
    if model.experts is not None:
        visited = visited * model.experts.top_k // model.experts.num_experts
    return visited + sum(size for size, experts in sizes if not experts)


def head_in_layers(model: ModelShape, length: int) -> float:
    """Multiplications of the output head, and of layers that predict further tokens, over those of a decoder layer, at
    a sequence length (causal attention)."""
    layer = active(model, model.layers - 1) + length * model.heads * model.qk_head_dim
    head = model.vocab * model.hidden / layer
    return head + model.mtp_layers * (1 + head)


@lru_cache(maxsize=4096)
def local_size(model: ModelShape, first: int, end: int, mesh: Mesh, *, experts: bool) -> int:
    """Elements that a rank of the mesh holds of a stage: of its experts, or of all else."""
    return sum(math.prod(each.local(mesh)) for each in tensors(model, first, end) if each.experts is experts)


def _all(model: ModelShape, first: int, end: int) -> Iterator[Tensor]:
    h, std = model.hidden, 0.02
    words = (_rows(model.vocab, model.vocab),)
    if first == 0:
        yield Tensor("embedding", (model.vocab, h), std, words)
    for layer in range(first, end):
        yield from _layer(model, layer)
    if end == model.layers:
        if not model.tie_word_embeddings or first > 0:
            yield Tensor("head", (model.vocab, h), std, words, like="embedding" if model.tie_word_embeddings else "")
        yield Tensor("norm", (h,), 0.0)
        yield from _predicted(model, alone=first == 0)


def _predicted(model: ModelShape, *, alone: bool) -> Iterator[Tensor]:
    """Of layers that predict further tokens; on a stage that has no embedding they need a copy of it."""
    h = model.hidden
    for number in range(model.mtp_layers):
        at = f"predicted.{number}"
        yield Tensor(f"{at}.join", (h, 2 * h), 0.02)
        for name in ("hidden_norm", "embedding_norm", "norm"):
            yield Tensor(f"{at}.{name}", (h,), 0.0)
        yield from _layer(model, model.layers + number)
    if model.mtp_layers and not model.tie_word_embeddings and not alone:
        cut = (_rows(model.vocab, model.vocab),)
        yield Tensor("predicted.embedding", (model.vocab, h), 0.02, cut, like="embedding")


def _own(own: CustomModel, first: int, end: int) -> Iterator[Tensor]:
    """Their first values are made by the user's file."""
    for number in range(first, end):
        yield from (Tensor(f"layers.{number}.{name}", shape, 0.0) for name, shape in own.layers[number].tensors)


def _layer(model: ModelShape, layer: int) -> Iterator[Tensor]:
    at, h = f"layers.{layer}", model.hidden
    deep = 0.02 / math.sqrt(2 * model.layers)
    if model.mla is None:
        yield from _attention(model, f"{at}.attention", deep)
    else:
        yield from _latent(model, model.mla, f"{at}.attention", deep)
    if model.experts is None or layer < model.experts.first_k_dense:
        yield from _gated(f"{at}.mlp", h, model.ffn, deep)
    else:
        yield from _experts(model.experts, at, h, deep)
    yield Tensor(f"{at}.attention_norm", (h,), 0.0)
    yield Tensor(f"{at}.mlp_norm", (h,), 0.0)


def _attention(model: ModelShape, at: str, deep: float) -> Iterator[Tensor]:
    h, d, n, m = model.hidden, model.qk_head_dim, model.heads, model.kv_heads
    runs = Run(n * d, n), Run(m * d, m), Run(m * d, m)
    yield Tensor(f"{at}.qkv", ((n + 2 * m) * d, h), 0.02, (Cut("tp", 0, runs),))
    yield Tensor(f"{at}.out", (h, n * d), deep, (_columns(n * d, n),))
    if model.qk_norm:
        yield Tensor(f"{at}.query_norm", (d,), 0.0)
        yield Tensor(f"{at}.key_norm", (d,), 0.0)


def _latent(model: ModelShape, latent: MLA, at: str, deep: float) -> Iterator[Tensor]:
    h, n = model.hidden, model.heads
    queries, both = n * model.qk_head_dim, n * (latent.qk_nope_head_dim + latent.v_head_dim)
    if latent.q_lora_rank:
        yield Tensor(f"{at}.query_down", (latent.q_lora_rank, h), 0.02)
        yield Tensor(f"{at}.query_norm", (latent.q_lora_rank,), 0.0)
    yield Tensor(f"{at}.query", (queries, latent.q_lora_rank or h), 0.02, (_rows(queries, n),))
    yield Tensor(f"{at}.latent", (latent.kv_lora_rank + latent.qk_rope_head_dim, h), 0.02)
    yield Tensor(f"{at}.latent_norm", (latent.kv_lora_rank,), 0.0)
    yield Tensor(f"{at}.keys_values", (both, latent.kv_lora_rank), 0.02, (_rows(both, n),))
    yield Tensor(f"{at}.out", (h, n * latent.v_head_dim), deep, (_columns(n * latent.v_head_dim, n),))


def _gated(at: str, hidden: int, ffn: int, deep: float) -> Iterator[Tensor]:
    yield Tensor(f"{at}.gate_up", (2 * ffn, hidden), 0.02, (Cut("tp", 0, 2 * (Run(ffn, ffn),)),))
    yield Tensor(f"{at}.down", (hidden, ffn), deep, (_columns(ffn, ffn),))


def _experts(experts: Experts, at: str, hidden: int, deep: float) -> Iterator[Tensor]:
    count, ffn = experts.num_experts, experts.intermediate_size
    own = Cut("ep", 0, (Run(count, count),))
    yield Tensor(f"{at}.experts.router", (count, hidden), 0.02)
    shape, cuts = (count, 2 * ffn, hidden), (own, Cut("tp", 1, 2 * (Run(ffn, ffn),)))
    yield Tensor(f"{at}.experts.gate_up", shape, 0.02, cuts, experts=True)
    shape, cuts = (count, hidden, ffn), (own, Cut("tp", 2, (Run(ffn, ffn),)))
    yield Tensor(f"{at}.experts.down", shape, deep, cuts, experts=True)
    if experts.shared_intermediate_size:
        yield from _gated(f"{at}.shared", hidden, experts.shared_intermediate_size, deep)


def _rows(size: int, units: int) -> Cut:
    return Cut("tp", 0, (Run(size, units),))


def _columns(size: int, units: int) -> Cut:
    return Cut("tp", 1, (Run(size, units),))
