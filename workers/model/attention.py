"""The attention sublayer: grouped-query attention with rotary positions, its heads split over the tp ranks.

B sequences, S positions of a slice, T = B S tokens, H hidden, N query heads and M key-value heads of this rank, D head
dim. With fewer key-value heads than tp ranks, several ranks compute the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.attention.rope import rope_
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.norm import SavedNorm, norm, norm_backward
from pentad.workers.model.weight_grad import LinearWgrad, Param, Params, Wgrad
from pentad.workers.parallel.async_ops import Task, gather2
from pentad.workers.parallel.context_parallel import SavedContext


class AttentionSaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N D]
    query_norm: SavedNorm | None  # of rows [T N, D]
    key_norm: SavedNorm | None  # of rows [T M, D]


class Attention(NamedTuple):
    qkv: Param  # [(N + 2M) D, H]
    out: Param  # [H, N D]
    query_norm: Param | None  # [D]
    key_norm: Param | None  # [D]

    @classmethod
    def bind(cls, params: Params, prefix: str) -> Attention:
        norms = (params.get(f"{prefix}.attention.{name}") for name in ("query_norm", "key_norm"))
        return cls(params[f"{prefix}.attention.qkv"], params[f"{prefix}.attention.out"], *norms)

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor
    ) -> Task[tuple[Tensor, AttentionSaved, Tensor]]:
        rotary, heads, kv_heads = sequence.rotary, *self._head_counts(context)
        full = yield from context.tp.all_gather(x)
        qkv = torch.mm(full, self.qkv.weight.t()).view(full.shape[0], -1, context.model.qk_head_dim)  # [T, N + 2M, D]
        query_norm = _norm_heads_(qkv[:, :heads], self.query_norm, context)
        key_norm = _norm_heads_(qkv[:, heads : heads + kv_heads], self.key_norm, context)
        rope_(qkv[:, : heads + kv_heads], rotary.cos, rotary.sin)
        out, saved = yield from attend(context, sequence, *qkv.split((heads, kv_heads, kv_heads), dim=1))
        y = yield from context.tp.matmul_reduce_scatter(out, self.out.weight.t())
        return y, AttentionSaved(saved, out, query_norm, key_norm), x

    def recompute(self, context: LayerContext, x: Tensor, saved: AttentionSaved) -> Tensor:
        """Only the input: none of the activations is cheap to recompute."""
        return x

    def backward(
        self, context: LayerContext, sequence: SequenceContext, saved: AttentionSaved, x: Tensor, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        rotary, heads, kv_heads = sequence.rotary, *self._head_counts(context)
        dy = yield from context.tp.all_gather(dy)
        grads = yield from attend_backward(
            context, sequence, saved.context, torch.mm(dy, self.out.weight), context.model.qk_head_dim
        )
        dqkv = torch.cat(grads, dim=2).flatten(0, 1)  # [T, N + 2M, D]
        del grads  # free before the products
        rope_(dqkv[:, : heads + kv_heads], rotary.cos, rotary.sin, inverse=True)
        norm_work = [
            *_norm_heads_backward_(dqkv[:, :heads], self.query_norm, saved.query_norm),
            *_norm_heads_backward_(dqkv[:, heads : heads + kv_heads], self.key_norm, saved.key_norm),
        ]
        dqkv = dqkv.view(dqkv.shape[0], -1)
        tp = context.tp
        x, dx = yield from gather2(tp.all_gather(x), tp.matmul_reduce_scatter(dqkv, self.qkv.weight))
        return dx, [LinearWgrad(self.out.gradient, dy, saved.out), LinearWgrad(self.qkv.gradient, dqkv, x), *norm_work]

    def _head_counts(self, context: LayerContext) -> tuple[int, int]:
        """Query heads and key-value heads of this rank."""
        width, head_dim = self.out.weight.shape[1], context.model.qk_head_dim
        return width // head_dim, (self.qkv.weight.shape[0] - width) // 2 // head_dim


def attend(
    context: LayerContext, sequence: SequenceContext, q: Tensor, k: Tensor, v: Tensor
) -> Task[tuple[Tensor, SavedContext]]:
    """(out [T, N D], what B needs) of queries [T, N, D], keys and values [T, M, D], after those of earlier slices."""
    q, k, v = (_by_sequence(each, sequence) for each in (q, k, v))
    k, v = sequence.kv_cache.extend((k, v), sequence.rotary.start)  # [B, M, start + S, D]
    out, saved = yield from context.cp.attend(q, k, v, sequence.documents, context.deterministic)  # [B, N, S, D]
    return out.transpose(1, 2).flatten(2).flatten(0, 1), saved


def attend_backward(
    context: LayerContext, sequence: SequenceContext, saved: SavedContext, dout: Tensor, head_dim: int
) -> Task[QKVGrads]:
    """Gradients [B, S, heads, D] of queries, keys and values, from that of the output [T, N head_dim]."""
    dout = _by_sequence(dout.unflatten(1, (-1, head_dim)), sequence)
    dq, dk, dv = yield from context.cp.attend_backward(dout, saved)
    dk, dv = sequence.kv_cache.slice_grads((dk, dv), sequence.rotary.start)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _by_sequence(x: Tensor, sequence: SequenceContext) -> Tensor:
    """[T, N, D] as [B, N, S, D]."""
    return x.view(-1, sequence.rotary.cos.shape[0], *x.shape[1:]).transpose(1, 2)


def _norm_heads_(heads: Tensor, param: Param | None, context: LayerContext) -> SavedNorm | None:
    """Norms each head of [T, heads, D] by itself, in place."""
    if param is None:
        return None
    normed, saved = norm(_flatten_heads(heads), param, context.model.norm_eps)
    heads.copy_(normed.view(heads.shape))
    return saved


def _norm_heads_backward_(dheads: Tensor, param: Param | None, saved: SavedNorm | None) -> list[Wgrad]:
    """The work for W; the gradient [T, heads, D] of the normed heads becomes that of their input, in place."""
    if param is None or saved is None:
        return []
    dinput, work = norm_backward(_flatten_heads(dheads), param, saved)
    dheads.copy_(dinput.view(dheads.shape))
    return [work]


def _flatten_heads(heads: Tensor) -> Tensor:
    """A copy [T heads, D], also of a single head, where `reshape` would return a view."""
    return heads.clone(memory_format=torch.contiguous_format).view(-1, heads.shape[2])
