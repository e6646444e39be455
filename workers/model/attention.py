"""The attention half of a layer: grouped heads with rotary positions, cut over the tensor ranks.

B batch rows, S positions of a piece, T = B*S tokens, H hidden, N query heads and M key-value heads of this rank, D head
dim. Where there are fewer key-value heads than ranks, several ranks compute the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.attention.rope import rope_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.workers.model.layer_context import Around, Place, Views
from pentad.workers.model.weight_grad import Deferred, Product, Sum
from pentad.workers.parallel.async_ops import Turns, gather2
from pentad.workers.parallel.context_parallel import Kept


class Weights(NamedTuple):
    qkv: torch.Tensor  # [(N + 2M) D, H]
    out: torch.Tensor  # [H, N D]
    query_norm: torch.Tensor | None  # [D]
    key_norm: torch.Tensor | None  # [D]


class Normed(NamedTuple):
    """What the norm of every head needs on the way back; heads of one token after the other."""

    heads: torch.Tensor  # [T heads, D]
    scale: torch.Tensor  # [T heads]


class Roots(NamedTuple):
    attended: Kept
    heads: torch.Tensor  # [T, N D] attention output
    queries: Normed | None
    keys: Normed | None


def weights_of(views: Views, at: str) -> Weights:
    norms = (views.get(f"{at}.attention.{name}") for name in ("query_norm", "key_norm"))
    return Weights(views[f"{at}.attention.qkv"], views[f"{at}.attention.out"], *norms)


def forward(w: Weights, around: Around, place: Place, x: torch.Tensor) -> Turns[tuple[torch.Tensor, Roots, None]]:
    rotation, past, _ = place
    heads, pairs = _counts(w, around)
    x = yield from around.tensor.gather(x)
    tokens = x.shape[0]
    qkv = torch.mm(x, w.qkv.t()).view(tokens, -1, around.model.qk_head_dim)  # [T, N + 2M, D]
    queries = _norm_(qkv[:, :heads], w.query_norm, around)
    keys = _norm_(qkv[:, heads : heads + pairs], w.key_norm, around)
    rope_(qkv[:, : heads + pairs], rotation.cos, rotation.sin)
    rows = qkv.view(-1, rotation.cos.shape[0], *qkv.shape[1:]).transpose(1, 2)  # [B, N + 2M, S, D]
    q, k, v = rows.split((heads, pairs, pairs), dim=1)
    k, v = past.extended((k, v), rotation.start)  # [B, M, start + S, D]
    out, attended = yield from around.context.attend(q, k, v, place.documents, around.deterministic)  # [B, N, S, D]
    mixed = out.transpose(1, 2).reshape(tokens, -1)
    out = yield from around.tensor.product(mixed, w.out.t())
    return out, Roots(attended, mixed, queries, keys), None


def leaves(w: Weights, around: Around, x: torch.Tensor, roots: Roots) -> None:
    """Nothing here is cheap."""


def backward(
    w: Weights, g: Weights, around: Around, place: Place, x: torch.Tensor, roots: Roots, leaves: None, dy: torch.Tensor
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    dy = yield from around.tensor.gather(dy)
    heads, pairs = _counts(w, around)
    dqkv = yield from _attention_backward(around, place, roots.attended, torch.mm(dy, w.out), heads, pairs)
    norms: list[Deferred] = []
    for each, weight, gradient, part in (
        (roots.queries, w.query_norm, g.query_norm, dqkv[:, :heads]),
        (roots.keys, w.key_norm, g.key_norm, dqkv[:, heads : heads + pairs]),
    ):
        if each is not None and weight is not None and gradient is not None:
            dheads, dnorm = rms_norm_backward(_flat(part), each.heads, weight, each.scale)
            part.copy_(dheads.view(part.shape))
            norms.append(Sum(gradient, dnorm))
    dqkv = dqkv.view(dqkv.shape[0], -1)
    whole, dx = yield from gather2(around.tensor.gather(x), around.tensor.product(dqkv, w.qkv))
    return dx, [Product(g.out, dy, roots.heads), Product(g.qkv, dqkv, whole), *norms]


def _counts(w: Weights, around: Around) -> tuple[int, int]:
    """Query heads and key-value heads of this rank."""
    heads, pairs = w.out.shape[1], (w.qkv.shape[0] - w.out.shape[1]) // 2
    return heads // around.model.qk_head_dim, pairs // around.model.qk_head_dim


def _norm_(heads: torch.Tensor, weight: torch.Tensor | None, around: Around) -> Normed | None:
    """Norms heads [T, count, D] in place, each by itself."""
    if weight is None:
        return None
    flat = _flat(heads)
    normed, entry, scale = rms_norm(flat, weight, around.model.norm_eps)
    heads.copy_(normed.view(heads.shape))
    return Normed(entry, scale)


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """A copy, [T count, D], also of a single head, which a view could say."""
    return heads.clone(memory_format=torch.contiguous_format).view(-1, heads.shape[2])


def _attention_backward(
    around: Around, place: Place, attended: Kept, dheads: torch.Tensor, heads: int, pairs: int
) -> Turns[torch.Tensor]:
    """Gradients [T, N + 2M, D] of the heads before their rotation."""
    rotation, past, _ = place
    dout = dheads.view(-1, rotation.cos.shape[0], heads, around.model.qk_head_dim).transpose(1, 2)
    dqueries, *reached = yield from around.context.attend_backward(dout, attended)
    grads = (dqueries, *past.own((reached[0], reached[1]), rotation.start))
    dqkv = torch.cat([grad.transpose(1, 2) for grad in grads], dim=2).flatten(0, 1)
    rope_(dqkv[:, : heads + pairs], rotation.cos, rotation.sin, inverse=True)
    return dqkv
