"""The attention sublayer: grouped-query attention with rotary positions, its heads split over the tp ranks.

B sequences, S positions of a slice, T = B S tokens, H hidden, N query heads and M key-value heads of this rank, D head
dim. With fewer key-value heads than tp ranks, several ranks compute the same key-value head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.attention.rope import rope_
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.casts import Casts, Operand
from pentad.workers.linear.linear import Linear, gather
from pentad.workers.linear.weight_grad import AddWgrad, Param, Params, Wgrad, bias_wgrad
from pentad.workers.model.layer_context import LayerContext, RotaryTable, SequenceContext
from pentad.workers.model.lora import ColumnAdapters, RowAdapter
from pentad.workers.model.norm import QKNorm, QKNormSaved
from pentad.workers.parallel.async_ops import Task, gather2, ready
from pentad.workers.parallel.context_parallel import (
    KeptAttention,
    KeptInputs,
    SavedContext,
    SavedUlysses,
    inputs_by_token,
    keep,
    keep_inputs,
)
from pentad.workers.parallel.row_split import RowSplit


class AttentionSaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N D]
    qk_norm: QKNormSaved | None


class KeptProjections(NamedTuple):
    """What is kept of attention if only its result is recomputed."""

    inputs: KeptInputs
    norms: Any  # what B needs of the norms or latents before them


class KeptRows(NamedTuple):
    """What is kept of attention if queries, keys and values are recomputed for all but the first rows."""

    result: KeptAttention | None  # None if it is recomputed
    qkv: tuple[Tensor, ...]  # [first rows, N + 2M, D], or after an exchange of heads each [cp first rows, heads, D]
    qk_norm: QKNormSaved | None  # of these rows


class HasContext(Protocol):
    @property
    def context(self) -> SavedContext:
        """What B needs of scaled dot-product attention."""


S = TypeVar("S", bound=HasContext)
Kept: TypeAlias = S | KeptProjections | KeptAttention | None  # of what F would otherwise save


class Attention(NamedTuple):
    qkv: Linear  # [(N + 2M) D, H]
    out: Linear  # [H, N D]
    qkv_bias: Param | None  # [(N + 2M) D]
    out_bias: Param | None  # [H]
    sinks: Param | None  # [N]
    qk_norm: QKNorm | None
    qkv_adapters: ColumnAdapters
    out_adapter: RowAdapter

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec, casts: Casts | None = None) -> Attention:
        at = f"{prefix}.attention"
        qk_norm = QKNorm.bind(params, at, model) if model.qk_norm else None
        qkv_bias, out_bias, sinks = (params.get(f"{at}.{name}") for name in ("qkv_bias", "out_bias", "sinks"))
        qkv = Linear.bind(params, f"{at}.qkv", casts)
        out = Linear.bind(params, f"{at}.out", casts, row_parallel=True)
        hidden, width = out.weight.shape
        kv_width = (qkv.weight.shape[0] - width) // 2
        widths = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        adapters = ColumnAdapters.bind(params, at, widths, "qkv_proj")
        out_adapter = RowAdapter.bind(params, f"{at}.o_proj", hidden)
        return cls(qkv, out, qkv_bias, out_bias, sinks, qk_norm, adapters, out_adapter)

    @property
    def caster(self) -> Linear | None:
        return None if self.qkv.casts is None else self.qkv

    def only_w_reads(self, context: LayerContext) -> bool:
        return context.tp.size == 1 and self.qkv.casts is None and not self.qkv_adapters.adapters

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Operand
    ) -> Task[tuple[Tensor, AttentionSaved, None]]:
        qkv, qk_norm = yield from self._queries_keys_values(context, x, sequence.rotary)
        saved = yield from self._attend(context, sequence, qkv, qk_norm)
        return (yield from self.project(context, saved.out)), saved, None

    def _attend(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        qkv: Tensor,
        qk_norm: QKNormSaved | None,
        kept: KeptAttention | None = None,
    ) -> Task[AttentionSaved]:
        """Everything but the projections. What was `kept` of attention is not recomputed."""
        heads, kv_heads = self._head_counts(context)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        out, saved = yield from attend(context, sequence, q, k, v, self.sinks and self.sinks.weight, kept)
        return AttentionSaved(saved, out, qk_norm)

    def _queries_keys_values(
        self, context: LayerContext, x: Operand, rotary: RotaryTable
    ) -> Task[tuple[Tensor, QKNormSaved | None]]:
        """(queries, keys and values [T, N + 2M, D], what B needs of their norms)."""
        axes, heads, kv_heads = context.axes, *self._head_counts(context)
        qkv = yield from self.qkv.forward_gathered(axes, x, self.qkv_bias and self.qkv_bias.weight)
        yield from self.qkv_adapters.add_(context, x, qkv)
        qkv = qkv.view(qkv.shape[0], -1, context.model.qk_head_dim)
        if self.qk_norm is None:
            rope_(qkv[:, : heads + kv_heads], rotary.cos, rotary.sin)
            return qkv, None
        q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
        return qkv, (yield from self.qk_norm.forward_(context.tp, q, k, rotary.cos, rotary.sin))

    def project(self, context: LayerContext, out: Tensor) -> Task[Tensor]:
        """The result [T / tp, H] from the output of the heads."""
        axes = context.axes
        y = yield from self.out.forward_scattered(axes, self.out.input(axes, out, rows=True))
        yield from self.out_adapter.add_(context, out, y)
        if self.out_bias is not None:
            y += self.out_bias.weight
        return y

    def keep(
        self, saved: AttentionSaved, recomputed: Collection[str], split: RowSplit | None = None
    ) -> Kept[AttentionSaved] | KeptRows:
        """What is kept if these parts are recomputed; with `split`, also the first rows of queries, keys and values."""
        drops_inputs, drops_result = (name in recomputed for name in ("qkv_linear", "core_attn"))
        if drops_inputs and split is not None:
            qk_norm = saved.qk_norm
            if qk_norm is not None:
                query, key = qk_norm.splits(split, len(saved.out))
                qk_norm = QKNormSaved(qk_norm.query.first(query), qk_norm.key.first(key))
            first = tuple(map(split.first, inputs_by_token(saved.context, len(saved.out))))
            qkv = first if isinstance(saved.context, SavedUlysses) else (torch.cat(first, dim=1),)
            return KeptRows(None if drops_result else keep(saved.context), qkv, qk_norm)
        return kept_of(saved, saved.qk_norm, drops_inputs=drops_inputs, drops_result=drops_result)

    def rebuild(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Callable[[RowSplit | None], Operand],
        kept: Kept[AttentionSaved] | KeptRows,
        split: RowSplit | None = None,
    ) -> Task[AttentionSaved]:
        """Recomputes what `keep` left out, with the kernels of the forward; `x` returns the sublayer's input, or given
        a split the rest of its rows."""
        if isinstance(kept, AttentionSaved):
            return kept
        if isinstance(kept, KeptRows):
            assert split is not None
            return (yield from self._attend_joined(context, sequence, x(split), kept, split))
        if isinstance(kept, KeptProjections):
            out, saved = yield from attend_again(context, sequence, kept.inputs, self.sinks and self.sinks.weight)
            return AttentionSaved(saved, out, kept.norms)
        qkv, qk_norm = yield from self._queries_keys_values(context, x(None), sequence.rotary)
        return (yield from self._attend(context, sequence, qkv, qk_norm, kept))

    def _attend_joined(
        self, context: LayerContext, sequence: SequenceContext, x: Operand, kept: KeptRows, split: RowSplit
    ) -> Task[AttentionSaved]:
        """`_attend` with the rows that were kept, joined with those computed from the input x."""
        is_exchanged, length = len(kept.qkv) > 1, sequence.rotary.length
        saved = len(kept.qkv[0]) // (sequence.cp.size if is_exchanged else 1)
        rotary = sequence.rotary.rest(split, saved // split.saved * split.size)
        qkv, rest = yield from self._queries_keys_values(context, x, rotary)
        qk_norm = kept.qk_norm
        if qk_norm is not None and rest is not None:
            query, key = qk_norm.splits(split, saved)
            qk_norm = QKNormSaved(qk_norm.query.joined(rest.query, query), qk_norm.key.joined(rest.key, key))
        if not is_exchanged:
            joined = split.join(kept.qkv[0], qkv)
            return (yield from self._attend(context, sequence, joined, qk_norm, kept.result))
        heads, kv_heads = self._head_counts(context)
        rows = qkv.split((heads, kv_heads, kv_heads), dim=1)
        inputs = yield from sequence.cp.join_inputs(kept.qkv, rows, split, length)
        out, found = yield from attend_again(context, sequence, inputs, self.sinks and self.sinks.weight, kept.result)
        return AttentionSaved(found, out, qk_norm)

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Operand,
        saved: AttentionSaved,
        recomputable: None,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        axes, rotary, heads, kv_heads = context.axes, sequence.rotary, *self._head_counts(context)
        vectors = list[Wgrad]()
        if self.out_bias is not None:
            vectors.append(bias_wgrad(self.out_bias, dy))
        dnarrow = yield from self.out_adapter.narrow_grad(context, dy)
        vectors += yield from self.out_adapter.wgrads(context, saved.out, dy, dnarrow)
        doutput, dout = yield from self.out.input_grad_gathered(axes, dy)
        del dy
        self.out_adapter.input_grad_(dnarrow, dout)
        grads, dsinks = yield from attend_backward(
            context, sequence, saved.context, dout, context.model.qk_head_dim, self.sinks and self.sinks.weight
        )
        del dout
        dqkv = joined_heads(grads).flatten(0, 1)  # [T, N + 2M, D]
        del grads  # free them before the products
        if self.qk_norm is not None and saved.qk_norm is not None:
            dq, dk, _ = dqkv.split((heads, kv_heads, kv_heads), dim=1)
            vectors += yield from self.qk_norm.backward_(axes.tp, dq, dk, saved.qk_norm, rotary.cos, rotary.sin)
        else:
            rope_(dqkv[:, : heads + kv_heads], rotary.cos, rotary.sin, inverse=True)
        dqkv = dqkv.view(dqkv.shape[0], -1)
        if self.qkv_bias is not None:
            vectors.append(bias_wgrad(self.qkv_bias, dqkv))
        if self.sinks is not None and dsinks is not None:
            vectors.append(AddWgrad(self.sinks.gradient, dsinks))
        local, dprojected = x, self.qkv.output_grad(axes, dqkv)
        rows = gather(axes, x) if self.qkv.gradient is not None else ready(x)  # only W needs all rows
        x, dx = yield from gather2(rows, self.qkv.input_grad_scattered(axes, dprojected))
        vectors += yield from self.qkv_adapters.backward_(context, local, dqkv, dx)
        x, out = self.qkv.input(axes, x, columns=True), self.out.input(axes, saved.out, columns=True)
        return dx, [self.out.wgrad(doutput, out), self.qkv.wgrad(dprojected, x), *vectors]

    def _head_counts(self, context: LayerContext) -> tuple[int, int]:
        """The numbers of query heads and key-value heads of this rank."""
        width, head_dim = self.out.weight.shape[1], context.model.qk_head_dim
        return width // head_dim, (self.qkv.weight.shape[0] - width) // 2 // head_dim


def kept_of(saved: S, norms: object, *, drops_inputs: bool, drops_result: bool) -> Kept[S]:
    """What is kept of attention if RECOMPUTE computes queries, keys and values again, or its result, or both."""
    if drops_inputs:
        return None if drops_result else keep(saved.context)
    return KeptProjections(keep_inputs(saved.context), norms) if drops_result else saved


def attend(
    context: LayerContext,
    sequence: SequenceContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    kept: KeptAttention | None = None,
) -> Task[tuple[Tensor, SavedContext]]:
    """(out [T, N D], what B needs) of queries [T, N, D], keys and values [T, M, D], which follow those of earlier
    slices, and sinks [N]. What was `kept` is not recomputed."""
    q, k, v = (_by_sequence(each, sequence) for each in (q, k, v))
    k, v = sequence.kv_cache.extend((k, v), sequence.rotary.start)  # [B, M, start + S, D]
    options = _options(context, sequence)
    out, saved = yield from sequence.cp.attend(q, k, v, options, sequence.documents, sinks, kept)  # [B, N, S, D]
    return _by_token(out), saved


def attend_again(
    context: LayerContext,
    sequence: SequenceContext,
    inputs: KeptInputs,
    sinks: Tensor | None = None,
    kept: KeptAttention | None = None,
) -> Task[tuple[Tensor, SavedContext]]:
    """What `attend` returned, from the inputs kept of it, and from its result if that was kept."""
    options = _options(context, sequence)
    out, saved = yield from sequence.cp.attend_again(inputs, options, sequence.documents, sinks, kept)
    return _by_token(out), saved


def _options(context: LayerContext, sequence: SequenceContext) -> AttentionOptions:
    model = context.model
    return AttentionOptions(
        True, model.softmax_scale, context.deterministic, softcap=model.attn_logit_softcapping
    ).within(sequence.window)


def attend_backward(
    context: LayerContext,
    sequence: SequenceContext,
    saved: SavedContext,
    dout: Tensor,
    head_dim: int,
    sinks: Tensor | None = None,
) -> Task[tuple[QKVGrads, Tensor | None]]:
    """(gradients [B, S, heads, D] of queries, keys and values, gradient [N] of the sinks) from the gradient of the
    output [T, N head_dim], with the same sinks as in the forward."""
    dout = _by_sequence(dout.unflatten(1, (-1, head_dim)), sequence)
    (dq, dk, dv), dsinks = yield from sequence.cp.attend_backward(dout, saved, sinks)
    dk, dv = sequence.kv_cache.slice_grads((dk, dv), sequence.rotary.start)
    return (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)), dsinks


def joined_heads(parts: Sequence[Tensor]) -> Tensor:
    """[B, S, all heads, D] from parts [B, S, heads, D]; without a copy if they are adjacent in memory."""
    first, (batch, length, _, width) = parts[0], parts[0].shape
    sizes = [part.shape[2] * width for part in parts]
    starts = [first.storage_offset() + sum(sizes[:number]) for number in range(len(parts))]
    are_joined = first.stride()[1:] == (sum(sizes), width, 1) and all(
        (part.untyped_storage().data_ptr(), part.stride(), part.storage_offset())
        == (first.untyped_storage().data_ptr(), first.stride(), start)
        for part, start in zip(parts, starts, strict=True)
    )
    if not are_joined:
        return torch.cat(list(parts), dim=2)
    return first.as_strided((batch, length, sum(sizes) // width, width), first.stride())


def _by_token(x: Tensor) -> Tensor:
    """[B, N, S, D] as [T, N D]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _by_sequence(x: Tensor, sequence: SequenceContext) -> Tensor:
    """[T, N, D] as [B, N, S, D]."""
    return x.view(-1, sequence.rotary.length, *x.shape[1:]).transpose(1, 2)
