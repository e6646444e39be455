"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the attention sublayer whose keys and
values are projected from one low-rank latent vector a token.

Latents are computed from this rank's tokens and gathered, which moves less than gathering the stream. T tokens, t of
them this rank's; R and Q the ranks of the key-value and query latents; N heads of this rank; P and O the query widths
without and with rotary position, E the value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import MLA
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views
from pentad.workers.model.weight_grad import AddWgrad, LinearWgrad, Wgrad
from pentad.workers.parallel.async_ops import AsyncResult, Task, gather2
from pentad.workers.parallel.context_parallel import SavedContext


class MLAWeights(NamedTuple):
    query_down: Tensor | None  # [Q, H]
    query_norm: Tensor | None  # [Q]
    query: Tensor  # [N (P + O), Q], or [N (P + O), H] without a query latent
    latent: Tensor  # [R + O, H]
    latent_norm: Tensor  # [R]
    keys_values: Tensor  # [N (P + E), R]
    out: Tensor  # [H, N E]


class NormedLatent(NamedTuple):
    """A latent before and after its norm."""

    input: Tensor  # [t, R]
    rstd: Tensor  # [t]
    normed: Tensor  # [t, R]


class MLASaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N E]
    q_latent: NormedLatent | None
    kv_latent: NormedLatent


def weights_of(views: Views, prefix: str) -> MLAWeights:
    return MLAWeights(
        views.get(f"{prefix}.attention.query_down"),
        views.get(f"{prefix}.attention.query_norm"),
        *(views[f"{prefix}.attention.{name}"] for name in ("query", "latent", "latent_norm", "keys_values", "out")),
    )


def forward(
    w: MLAWeights, context: LayerContext, sequence: SequenceContext, x: Tensor
) -> Task[tuple[Tensor, MLASaved, None]]:
    shape, tp, (rotary, kv_cache, documents) = _shape(context), context.tp, sequence
    nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
    q_latent = None
    if w.query_down is not None and w.query_norm is not None:
        q_latent = _norm_latent(torch.mm(x, w.query_down.t()), w.query_norm, context)
    q_gather = tp.all_gather(x if q_latent is None else q_latent.normed)
    latent = torch.mm(x, w.latent.t())  # [t, R + O]
    kv_latent = _norm_latent(latent[:, :rank].contiguous(), w.latent_norm, context)
    latent = torch.cat((kv_latent.normed, latent[:, rank:]), dim=1)
    q_input, latent = yield from gather2(q_gather, tp.all_gather(latent))  # [T, Q], [T, R + O]
    q = torch.mm(q_input, w.query.t())
    q = q.view(q.shape[0], -1, nope + shape.qk_rope_head_dim)  # [T, N, P + O]
    rope_(q[:, :, nope:], rotary.cos, rotary.sin)
    rotary_key = latent[:, None, rank:]  # [T, 1, O], shared by all heads
    rope_(rotary_key, rotary.cos, rotary.sin)
    kv = torch.mm(latent[:, :rank], w.keys_values.t()).view(q.shape[0], q.shape[1], -1)  # [T, N, P + E]
    k = torch.cat((kv[:, :, :nope], rotary_key.expand(-1, q.shape[1], -1)), dim=2)
    q, k, v = (_by_sequence(x, sequence) for x in (q, k, kv[:, :, nope:]))
    k, v = kv_cache.extend((k, v), rotary.start)
    out, saved = yield from context.cp.attend(q, k, v, documents, context.deterministic)  # [B, N, S, E]
    out = out.transpose(1, 2).flatten(2).flatten(0, 1)
    y = yield from tp.matmul_reduce_scatter(out, w.out.t())
    return y, MLASaved(saved, out, q_latent, kv_latent), None


def recompute(w: MLAWeights, context: LayerContext, x: Tensor, saved: MLASaved) -> None:
    """Nothing: every activation is saved, as none is cheap to recompute."""


def backward(
    w: MLAWeights,
    g: MLAWeights,
    context: LayerContext,
    sequence: SequenceContext,
    x: Tensor,
    saved: MLASaved,
    recomputable: None,
    dy: Tensor,
) -> Task[tuple[Tensor, list[Wgrad]]]:
    shape, tp, latent = _shape(context), context.tp, saved.kv_latent
    nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
    dy = yield from tp.all_gather(dy)
    dq, dk, dv = yield from _attention_backward(context, sequence, saved.context, torch.mm(dy, w.out))  # [T, N, ...]
    dq = dq.flatten(1)
    drotary_key = dk[:, :, nope:].sum(1)  # all heads share it
    dkv = torch.cat((dk[:, :, :nope], dv), dim=2).flatten(1)
    latent_gather = tp.all_gather(latent.normed)
    dlatent_scatter = tp.reduce_scatter(torch.cat((torch.mm(dkv, w.keys_values), drotary_key), dim=1))
    in_flight = gather2(dlatent_scatter, _query_backward_start(w, context, x, saved.q_latent, dq))
    kv_latent, (dlatent, (dq_input, q_input)) = yield from gather2(latent_gather, in_flight)  # dlatent [t, R + O]
    dinput, dnorm = rms_norm_backward(dlatent[:, :rank].contiguous(), latent.input, w.latent_norm, latent.rstd)
    dlatent = torch.cat((dinput, dlatent[:, rank:]), dim=1)
    work: list[Wgrad] = [
        LinearWgrad(g.out, dy, saved.out),
        LinearWgrad(g.keys_values, dkv, kv_latent),
        LinearWgrad(g.latent, dlatent, x),
        AddWgrad(g.latent_norm, dnorm),
        LinearWgrad(g.query, dq, q_input),
    ]
    dx, query_work = _query_latent_backward(w, g, x, saved.q_latent, dq_input)
    return torch.mm(dlatent, w.latent) + dx, [*work, *query_work]


def _query_backward_start(
    w: MLAWeights, context: LayerContext, x: Tensor, latent: NormedLatent | None, dq: Tensor
) -> AsyncResult[tuple[Tensor, Tensor]]:
    """(gradient [t, Q] of the input of the query projection, that input [T, Q] of all tokens)."""
    q_input = x if latent is None else latent.normed
    return gather2(context.tp.matmul_reduce_scatter(dq, w.query), context.tp.all_gather(q_input))


def _query_latent_backward(
    w: MLAWeights, g: MLAWeights, x: Tensor, latent: NormedLatent | None, dq_input: Tensor
) -> tuple[Tensor, list[Wgrad]]:
    """(gradient of x by way of the queries, work for W) from that of the input of the query projection."""
    if latent is None or w.query_down is None or w.query_norm is None:
        return dq_input, []
    dlatent, dnorm = rms_norm_backward(dq_input, latent.input, w.query_norm, latent.rstd)
    assert g.query_down is not None
    assert g.query_norm is not None
    return torch.mm(dlatent, w.query_down), [LinearWgrad(g.query_down, dlatent, x), AddWgrad(g.query_norm, dnorm)]


def _attention_backward(
    context: LayerContext, sequence: SequenceContext, saved: SavedContext, dout: Tensor
) -> Task[tuple[Tensor, Tensor, Tensor]]:
    """Gradients [T, N, ...] of queries, keys and values before the rotation, from that of the output [T, N E]."""
    shape, (rotary, kv_cache, _) = _shape(context), sequence
    dout = _by_sequence(dout.unflatten(1, (-1, shape.v_head_dim)), sequence)
    dq, dk, dv = yield from context.cp.attend_backward(dout, saved)
    grads = (dq, *kv_cache.slice_grads((dk, dv), rotary.start))
    dq, dk, dv = (grad.transpose(1, 2).flatten(0, 1) for grad in grads)
    for grad in (dq, dk):
        rope_(grad[:, :, shape.qk_nope_head_dim :], rotary.cos, rotary.sin, inverse=True)
    return dq, dk, dv


def _norm_latent(x: Tensor, weight: Tensor, context: LayerContext) -> NormedLatent:
    normed, x, rstd = rms_norm(x, weight, context.model.norm_eps)
    return NormedLatent(x, rstd, normed)


def _by_sequence(x: Tensor, sequence: SequenceContext) -> Tensor:
    """[T, N, D] as [B, N, S, D]."""
    return x.view(-1, sequence.rotary.cos.shape[0], *x.shape[1:]).transpose(1, 2)


def _shape(context: LayerContext) -> MLA:
    assert context.model.mla is not None
    return context.model.mla
