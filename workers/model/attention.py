"""The attention sublayer: grouped-query attention with rotary positions, its heads split over the tp ranks.

B sequences, S positions of a slice, T = B S tokens, H hidden, N query heads and M key-value heads of this rank, D head
dim. With fewer key-value heads than tp ranks, several ranks compute the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.attention.rope import rope_
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.weight_grad import AddWgrad, LinearWgrad, Param, Params, Wgrad, bias_wgrad
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.lora import Adapter, ColumnAdapters, RowAdapter
from pentad.workers.model.norm import QKNorm, QKNormSaved
from pentad.workers.parallel.async_ops import Task, gather2, ready
from pentad.workers.parallel.context_parallel import KeptAttention, SavedContext, keep


class AttentionSaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N D]
    qk_norm: QKNormSaved | None


class Attention(NamedTuple):
    qkv: Param  # [(N + 2M) D, H]
    out: Param  # [H, N D]
    qkv_bias: Param | None  # [(N + 2M) D]
    out_bias: Param | None  # [H]
    sinks: Param | None  # [N]
    qk_norm: QKNorm | None
    qkv_adapters: ColumnAdapters
    out_adapter: RowAdapter

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec) -> Attention:
        at = f"{prefix}.attention"
        qk_norm = QKNorm.bind(params, at, model) if model.qk_norm else None
        qkv_bias, out_bias, sinks = (params.get(f"{at}.{name}") for name in ("qkv_bias", "out_bias", "sinks"))
        qkv, out = params[f"{at}.qkv"], params[f"{at}.out"]
        hidden, width = out.weight.shape
        kv_width = (qkv.weight.shape[0] - width) // 2
        widths = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        adapters = ColumnAdapters(Adapter.bind_all(params, at, widths))
        out_adapter = RowAdapter.bind(params, f"{at}.o_proj", hidden)
        return cls(qkv, out, qkv_bias, out_bias, sinks, qk_norm, adapters, out_adapter)

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor, kept: KeptAttention | None = None
    ) -> Task[tuple[Tensor, AttentionSaved, None]]:
        rotary, heads, kv_heads = sequence.rotary, *self._head_counts(context)
        full = yield from context.tp.all_gather(x)
        qkv = self._project(full)
        yield from self.qkv_adapters.add_(context, x, qkv)
        qkv = qkv.view(full.shape[0], -1, context.model.qk_head_dim)  # [T, N + 2M, D]
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        qk_norm = None
        if self.qk_norm is not None:
            qk_norm = yield from self.qk_norm.forward_(context.tp, q, k)
        rope_(qkv[:, : heads + kv_heads], rotary.cos, rotary.sin)
        out, saved = yield from attend(context, sequence, q, k, v, self.sinks and self.sinks.weight, kept)
        y = yield from context.tp.matmul_reduce_scatter(out, self.out.weight.t())
        yield from self.out_adapter.add_(context, out, y)
        if self.out_bias is not None:
            y += self.out_bias.weight
        return y, AttentionSaved(saved, out, qk_norm), None

    def keep(self, saved: AttentionSaved) -> KeptAttention | None:
        return keep(saved.context)

    def recompute(self, context: LayerContext, x: Tensor, saved: AttentionSaved) -> None:
        """Nothing: none of the activations is cheap to recompute."""

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Tensor,
        saved: AttentionSaved,
        recomputable: None,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        rotary, heads, kv_heads = sequence.rotary, *self._head_counts(context)
        vectors = list[Wgrad]()
        if self.out_bias is not None:
            vectors.append(bias_wgrad(self.out_bias, dy))
        dnarrow = yield from self.out_adapter.narrow_grad(context, dy)
        vectors += yield from self.out_adapter.wgrads(context, saved.out, dy, dnarrow)
        dy = yield from context.tp.all_gather(dy)
        dout = torch.mm(dy, self.out.weight)
        self.out_adapter.input_grad_(dnarrow, dout)
        grads, dsinks = yield from attend_backward(
            context,
            sequence,
            saved.context,
            dout,
            context.model.qk_head_dim,
            self.sinks and self.sinks.weight,
        )
        del dout
        dqkv = torch.cat(grads, dim=2).flatten(0, 1)  # [T, N + 2M, D]
        del grads  # free before the products
        rope_(dqkv[:, : heads + kv_heads], rotary.cos, rotary.sin, inverse=True)
        tp = context.tp
        if self.qk_norm is not None and saved.qk_norm is not None:
            dq, dk, _ = dqkv.split((heads, kv_heads, kv_heads), dim=1)
            vectors += yield from self.qk_norm.backward_(tp, dq, dk, saved.qk_norm)
        dqkv = dqkv.view(dqkv.shape[0], -1)
        if self.qkv_bias is not None:
            vectors.append(bias_wgrad(self.qkv_bias, dqkv))
        if self.sinks is not None and dsinks is not None:
            vectors.append(AddWgrad(self.sinks.gradient, dsinks))
        local = x
        gather = tp.all_gather(x) if self.qkv.gradient is not None else ready(x)  # only W needs all rows
        x, dx = yield from gather2(gather, tp.matmul_reduce_scatter(dqkv, self.qkv.weight))
        vectors += yield from self.qkv_adapters.backward_(context, local, dqkv, dx)
        return dx, [LinearWgrad(self.out.gradient, dy, saved.out), LinearWgrad(self.qkv.gradient, dqkv, x), *vectors]

    def _project(self, x: Tensor) -> Tensor:
        weight = self.qkv.weight.t()
        return torch.mm(x, weight) if self.qkv_bias is None else torch.addmm(self.qkv_bias.weight, x, weight)

    def _head_counts(self, context: LayerContext) -> tuple[int, int]:
        """Query heads and key-value heads of this rank."""
        width, head_dim = self.out.weight.shape[1], context.model.qk_head_dim
        return width // head_dim, (self.qkv.weight.shape[0] - width) // 2 // head_dim


def attend(
    context: LayerContext,
    sequence: SequenceContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    kept: KeptAttention | None = None,
) -> Task[tuple[Tensor, SavedContext]]:
    """(out [T, N D], what B needs) of queries [T, N, D], keys and values [T, M, D], after those of earlier slices, and
    sinks [N]; what was `kept` is not computed again."""
    q, k, v = (_by_sequence(each, sequence) for each in (q, k, v))
    k, v = sequence.kv_cache.extend((k, v), sequence.rotary.start)  # [B, M, start + S, D]
    model = context.model
    options = AttentionOptions(
        True, model.softmax_scale, context.deterministic, softcap=model.attn_logit_softcapping
    ).within(sequence.window)
    out, saved = yield from context.cp.attend(q, k, v, options, sequence.documents, sinks, kept)  # [B, N, S, D]
    return out.transpose(1, 2).flatten(2).flatten(0, 1), saved


def attend_backward(
    context: LayerContext,
    sequence: SequenceContext,
    saved: SavedContext,
    dout: Tensor,
    head_dim: int,
    sinks: Tensor | None = None,
) -> Task[tuple[QKVGrads, Tensor | None]]:
    """(gradients [B, S, heads, D] of queries, keys and values, that of the sinks [N]) from that of the output
    [T, N head_dim], with the same sinks as forward."""
    dout = _by_sequence(dout.unflatten(1, (-1, head_dim)), sequence)
    (dq, dk, dv), dsinks = yield from context.cp.attend_backward(dout, saved, sinks)
    dk, dv = sequence.kv_cache.slice_grads((dk, dv), sequence.rotary.start)
    return (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)), dsinks


def _by_sequence(x: Tensor, sequence: SequenceContext) -> Tensor:
    """[T, N, D] as [B, N, S, D]."""
    return x.view(-1, sequence.rotary.cos.shape[0], *x.shape[1:]).transpose(1, 2)
