"""The attention half of a layer whose keys and values come from one narrow vector a token (multi-head latent attention,
DeepSeek-V2, arXiv 2405.04434, section 2.1).

Tokens are compressed where they are, and the narrow vectors are gathered. T tokens, t of them this rank's; R and Q are
the widths of the vectors, N this rank's heads, P and O the widths of a query's parts without and with a position, E
that of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.attention.rope import rope_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import MLA
from pentad.workers.model.layer_context import Around, Place, Views
from pentad.workers.model.weight_grad import Deferred, Product, Sum
from pentad.workers.parallel.async_ops import AsyncResult, Turns, gather2
from pentad.workers.parallel.context_parallel import Kept


class Weights(NamedTuple):
    query_down: torch.Tensor | None  # [Q, H]
    query_norm: torch.Tensor | None  # [Q]
    query: torch.Tensor  # [N (P + O), Q], or from H
    latent: torch.Tensor  # [R + O, H]
    latent_norm: torch.Tensor  # [R]
    keys_values: torch.Tensor  # [N (P + E), R]
    out: torch.Tensor  # [H, N E]


class Narrow(NamedTuple):
    """A vector a token before and after its norm."""

    entry: torch.Tensor  # [t, R]
    scale: torch.Tensor  # [t]
    normed: torch.Tensor  # [t, R]


class Roots(NamedTuple):
    attended: Kept
    heads: torch.Tensor  # [T, N E] attention output
    queries: Narrow | None
    pairs: Narrow


def weights_of(views: Views, at: str) -> Weights:
    return Weights(
        views.get(f"{at}.attention.query_down"),
        views.get(f"{at}.attention.query_norm"),
        *(views[f"{at}.attention.{name}"] for name in ("query", "latent", "latent_norm", "keys_values", "out")),
    )


def forward(w: Weights, around: Around, place: Place, x: torch.Tensor) -> Turns[tuple[torch.Tensor, Roots, None]]:
    latent, tensor, cos, sin = _latent(around), around.tensor, place.rotation.cos, place.rotation.sin
    queries = None
    if w.query_down is not None and w.query_norm is not None:
        queries = _narrow(torch.mm(x, w.query_down.t()), w.query_norm, around)
    coming = tensor.gather(x if queries is None else queries.normed)
    own = torch.mm(x, w.latent.t())
    pairs = _narrow(own[:, : latent.kv_lora_rank].contiguous(), w.latent_norm, around)
    own = torch.cat((pairs.normed, own[:, latent.kv_lora_rank :]), dim=1)
    wide, gathered = yield from gather2(coming, tensor.gather(own))  # [T, Q], [T, R + O]
    q = torch.mm(wide, w.query.t())
    q = q.view(q.shape[0], -1, latent.qk_nope_head_dim + latent.qk_rope_head_dim)  # [T, N, P + O]
    rope_(q[:, :, latent.qk_nope_head_dim :], cos, sin)
    shared = gathered[:, None, latent.kv_lora_rank :]  # [T, 1, O]: one rotated key for all heads
    rope_(shared, cos, sin)
    kv = torch.mm(gathered[:, : latent.kv_lora_rank], w.keys_values.t()).view(
        q.shape[0], q.shape[1], -1
    )  # [T, N, P + E]
    k = torch.cat((kv[:, :, : latent.qk_nope_head_dim], shared.expand(-1, q.shape[1], -1)), dim=2)
    q, k, v = (_rows(each, place) for each in (q, k, kv[:, :, latent.qk_nope_head_dim :]))
    k, v = place.past.extended((k, v), place.rotation.start)
    out, attended = yield from around.context.attend(q, k, v, place.documents, around.deterministic)  # [B, N, S, E]
    heads = out.transpose(1, 2).flatten(2).flatten(0, 1)
    out = yield from tensor.product(heads, w.out.t())
    return out, Roots(attended, heads, queries, pairs), None


def leaves(w: Weights, around: Around, x: torch.Tensor, roots: Roots) -> None:
    """Nothing here is cheap."""


def backward(
    w: Weights, g: Weights, around: Around, place: Place, x: torch.Tensor, roots: Roots, leaves: None, dy: torch.Tensor
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    latent, tensor = _latent(around), around.tensor
    dy = yield from tensor.gather(dy)
    dq, dk, dv = yield from _attention_backward(around, place, roots.attended, torch.mm(dy, w.out))  # [T, N, ...]
    shared = dk[:, :, latent.qk_nope_head_dim :].sum(1)  # of the key that all heads have
    dkv = torch.cat((dk[:, :, : latent.qk_nope_head_dim], dv), dim=2).flatten(1)
    coming = tensor.gather(roots.pairs.normed)
    partial = torch.cat((torch.mm(dkv, w.keys_values), shared), dim=1)  # [T, R + O]
    coming_too = gather2(tensor.scatter(partial), _queries_coming(w, around, x, roots.queries, dq.flatten(1)))
    pairs, (own, gathered) = yield from gather2(coming, coming_too)  # own [t, R + O]
    dentry, dnorm = rms_norm_backward(
        own[:, : latent.kv_lora_rank].contiguous(), roots.pairs.entry, w.latent_norm, roots.pairs.scale
    )
    dboth = torch.cat((dentry, own[:, latent.kv_lora_rank :]), dim=1)
    work: list[Deferred] = [
        Product(g.out, dy, roots.heads),
        Product(g.keys_values, dkv, pairs),
        Product(g.latent, dboth, x),
        Sum(g.latent_norm, dnorm),
    ]
    dqueries, more = _queries_backward(w, g, around, x, roots.queries, dq.flatten(1), *gathered)
    return torch.mm(dboth, w.latent) + dqueries, [*work, *more]


def _queries_coming(
    w: Weights, around: Around, x: torch.Tensor, queries: Narrow | None, dq: torch.Tensor
) -> AsyncResult[tuple[torch.Tensor, torch.Tensor]]:
    """(the gradient [t, Q] of what queries are made of, all tokens' [T, Q] of that)."""
    return gather2(around.tensor.product(dq, w.query), around.tensor.gather(x if queries is None else queries.normed))


def _queries_backward(
    w: Weights,
    g: Weights,
    around: Around,
    x: torch.Tensor,
    queries: Narrow | None,
    dq: torch.Tensor,
    own: torch.Tensor,
    whole: torch.Tensor,
) -> tuple[torch.Tensor, list[Deferred]]:
    if queries is None or w.query_down is None or w.query_norm is None:
        return own, [Product(g.query, dq, whole)]
    dentry, dnorm = rms_norm_backward(own, queries.entry, w.query_norm, queries.scale)
    assert g.query_down is not None
    assert g.query_norm is not None
    work: list[Deferred] = [
        Product(g.query, dq, whole),
        Product(g.query_down, dentry, x),
        Sum(g.query_norm, dnorm),
    ]
    return torch.mm(dentry, w.query_down), work


def _attention_backward(
    around: Around, place: Place, attended: Kept, dheads: torch.Tensor
) -> Turns[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gradients [T, N, ...] of queries, keys and values before their rotation."""
    latent, (rotation, past, _) = _latent(around), place
    dout = dheads.view(-1, rotation.cos.shape[0], dheads.shape[1] // latent.v_head_dim, latent.v_head_dim).transpose(
        1, 2
    )
    dqueries, *reached = yield from around.context.attend_backward(dout, attended)
    grads = (dqueries, *past.own((reached[0], reached[1]), rotation.start))
    dq, dk, dv = (grad.transpose(1, 2).flatten(0, 1) for grad in grads)
    for each in (dq, dk):
        rope_(each[:, :, latent.qk_nope_head_dim :], rotation.cos, rotation.sin, inverse=True)
    return dq, dk, dv


def _narrow(x: torch.Tensor, weight: torch.Tensor, around: Around) -> Narrow:
    normed, entry, scale = rms_norm(x, weight, around.model.norm_eps)
    return Narrow(entry, scale, normed)


def _rows(x: torch.Tensor, place: Place) -> torch.Tensor:
    """[T, N, D] as [B, N, S, D]."""
    return x.view(-1, place.rotation.cos.shape[0], *x.shape[1:]).transpose(1, 2)


def _latent(around: Around) -> MLA:
    assert around.model.mla is not None
    return around.model.mla
