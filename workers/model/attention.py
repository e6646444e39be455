"""The attention sublayer: grouped-query attention with rotary positions, its heads split over the tp ranks.

B sequences, S positions of a slice, T = B S tokens, H hidden, N query heads and M key-value heads of this rank, D head
dim. With fewer key-value heads than tp ranks, several ranks compute the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views
from pentad.workers.model.weight_grad import AddWgrad, LinearWgrad, Wgrad
from pentad.workers.parallel.async_ops import Task, gather2
from pentad.workers.parallel.context_parallel import SavedContext


class AttentionWeights(NamedTuple):
    qkv: Tensor  # [(N + 2M) D, H]
    out: Tensor  # [H, N D]
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]


class SavedHeadNorm(NamedTuple):
    """What the backward of a norm per head needs; the heads of a token are consecutive rows."""

    input: Tensor  # [T heads, D]
    rstd: Tensor  # [T heads]


class AttentionSaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N D]
    query_norm: SavedHeadNorm | None
    key_norm: SavedHeadNorm | None


def weights_of(views: Views, prefix: str) -> AttentionWeights:
    norms = (views.get(f"{prefix}.attention.{name}") for name in ("query_norm", "key_norm"))
    return AttentionWeights(views[f"{prefix}.attention.qkv"], views[f"{prefix}.attention.out"], *norms)


def forward(
    w: AttentionWeights, context: LayerContext, sequence: SequenceContext, x: Tensor
) -> Task[tuple[Tensor, AttentionSaved, None]]:
    rotary, kv_cache, documents = sequence
    heads, kv_heads = _head_counts(w, context)
    x = yield from context.tp.all_gather(x)
    qkv = torch.mm(x, w.qkv.t()).view(x.shape[0], -1, context.model.qk_head_dim)  # [T, N + 2M, D]
    query_norm = _norm_heads_(qkv[:, :heads], w.query_norm, context)
    key_norm = _norm_heads_(qkv[:, heads : heads + kv_heads], w.key_norm, context)
    rope_(qkv[:, : heads + kv_heads], rotary.cos, rotary.sin)
    by_sequence = qkv.view(-1, rotary.cos.shape[0], *qkv.shape[1:]).transpose(1, 2)  # [B, N + 2M, S, D]
    q, k, v = by_sequence.split((heads, kv_heads, kv_heads), dim=1)
    k, v = kv_cache.extend((k, v), rotary.start)  # [B, M, start + S, D]
    out, saved = yield from context.cp.attend(q, k, v, documents, context.deterministic)  # [B, N, S, D]
    out = out.transpose(1, 2).reshape(x.shape[0], -1)
    y = yield from context.tp.matmul_reduce_scatter(out, w.out.t())
    return y, AttentionSaved(saved, out, query_norm, key_norm), None


def recompute(w: AttentionWeights, context: LayerContext, x: Tensor, saved: AttentionSaved) -> None:
    """Nothing: every activation is saved, as none is cheap to recompute."""


def backward(
    w: AttentionWeights,
    g: AttentionWeights,
    context: LayerContext,
    sequence: SequenceContext,
    x: Tensor,
    saved: AttentionSaved,
    recomputable: None,
    dy: Tensor,
) -> Task[tuple[Tensor, list[Wgrad]]]:
    dy = yield from context.tp.all_gather(dy)
    heads, kv_heads = _head_counts(w, context)
    dqkv = yield from _attention_backward(context, sequence, saved.context, torch.mm(dy, w.out), heads, kv_heads)
    norm_work: list[Wgrad] = []
    for norm, weight, gradient, part in (
        (saved.query_norm, w.query_norm, g.query_norm, dqkv[:, :heads]),
        (saved.key_norm, w.key_norm, g.key_norm, dqkv[:, heads : heads + kv_heads]),
    ):
        if norm is not None and weight is not None and gradient is not None:
            dheads, dnorm = rms_norm_backward(_flatten_heads(part), norm.input, weight, norm.rstd)
            part.copy_(dheads.view(part.shape))
            norm_work.append(AddWgrad(gradient, dnorm))
    dqkv = dqkv.view(dqkv.shape[0], -1)
    x, dx = yield from gather2(context.tp.all_gather(x), context.tp.matmul_reduce_scatter(dqkv, w.qkv))
    return dx, [LinearWgrad(g.out, dy, saved.out), LinearWgrad(g.qkv, dqkv, x), *norm_work]


def _head_counts(w: AttentionWeights, context: LayerContext) -> tuple[int, int]:
    """Query heads and key-value heads of this rank."""
    width, head_dim = w.out.shape[1], context.model.qk_head_dim
    return width // head_dim, (w.qkv.shape[0] - width) // 2 // head_dim


def _norm_heads_(heads: Tensor, weight: Tensor | None, context: LayerContext) -> SavedHeadNorm | None:
    """Norms each head of [T, heads, D] by itself, in place."""
    if weight is None:
        return None
    normed, flat, rstd = rms_norm(_flatten_heads(heads), weight, context.model.norm_eps)
    heads.copy_(normed.view(heads.shape))
    return SavedHeadNorm(flat, rstd)


def _flatten_heads(heads: Tensor) -> Tensor:
    """A copy [T heads, D], also of a single head, where `reshape` would return a view."""
    return heads.clone(memory_format=torch.contiguous_format).view(-1, heads.shape[2])


def _attention_backward(
    context: LayerContext, sequence: SequenceContext, saved: SavedContext, dout: Tensor, heads: int, kv_heads: int
) -> Task[Tensor]:
    """The gradient of qkv before the rotation, [T, N + 2M, D], from that of the attention output [T, N D]."""
    rotary, kv_cache, _ = sequence
    dout = dout.view(-1, rotary.cos.shape[0], heads, context.model.qk_head_dim).transpose(1, 2)  # [B, N, S, D]
    dq, dk, dv = yield from context.cp.attend_backward(dout, saved)
    grads = (dq, *kv_cache.slice_grads((dk, dv), rotary.start))
    dqkv = torch.cat([grad.transpose(1, 2) for grad in grads], dim=2).flatten(0, 1)
    rope_(dqkv[:, : heads + kv_heads], rotary.cos, rotary.sin, inverse=True)
    return dqkv
