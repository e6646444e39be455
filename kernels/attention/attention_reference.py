"""Partial attention and its backward in torch operations, for any dtype and device."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype


class PackedLengths(NamedTuple):
    """Segments that do not attend to each other, of all rows joined end to end (flash attention's varlen form)."""

    cu_seqlens_q: Tensor  # [segments + 1] int32 on the device: where segments of the queries begin and end
    cu_seqlens_k: Tensor  # the same for the keys
    max_seqlens: tuple[int, int]  # the longest segment of the queries and of the keys


class AttentionOptions(NamedTuple):
    """With `causal`, the queries (of each segment) are at the last keys' positions, and see keys up to their own.

    Without `fixed_shape`, every call may have another shape: cuDNN, which makes a plan for each, is then not used.
    """

    causal: bool
    scale: float
    deterministic: bool
    lengths: PackedLengths | None = None
    fixed_shape: bool = True


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """The factor of the scores: 1 / sqrt(D) unless given."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def partial_attention_reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, Dv], lse [B, N, S] in float32 or wider); memory grows with S K."""
    scores = _scores(q, k, options)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _expand_kv(v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def partial_attention_backward_reference(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this part, from `dout`, `out` and `lse` of the full attention."""
    groups = k.shape[1]
    p = (_scores(q, k, options) - _group_heads(lse.unsqueeze(-1), groups)).exp()  # [B, M, N / M, S, K]
    wide = _group_heads(dout, groups)
    dv = p.transpose(-1, -2) @ wide
    delta = (wide * _group_heads(out, groups)).sum(-1, keepdim=True)
    ds = p * (wide @ _expand_kv(v).transpose(-1, -2) - delta) * options.scale
    dq = ds @ _expand_kv(k)
    dk = ds.transpose(-1, -2) @ _group_heads(q, groups)
    return dq.flatten(1, 2).to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """[B, N, ...] as [B, M, N / M, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (groups, -1))


def _expand_kv(x: Tensor) -> Tensor:
    """[B, M, ...] as [B, M, 1, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """[B, M, N / M, S, K]"""
    scores = _group_heads(q, k.shape[1]) @ _expand_kv(k).transpose(-1, -2) * options.scale
    return scores.masked_fill(~_visible(q, k, options.lengths), -math.inf) if options.causal else scores


def _visible(q: Tensor, k: Tensor, lengths: PackedLengths | None) -> Tensor:
    """[S, K], or [B, 1, 1, S, K] with segments."""
    if lengths is None:
        full = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return full.tril(k.shape[2] - q.shape[2])
    q_segment, q_left = _segments(lengths.cu_seqlens_q, q)
    k_segment, k_left = _segments(lengths.cu_seqlens_k, k)
    return (q_segment.unsqueeze(-1) == k_segment.unsqueeze(-2)) & (q_left.unsqueeze(-1) <= k_left.unsqueeze(-2))


def _segments(cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(segment, distance to its end), each [B, 1, 1, S], of every token of x [B, heads, S, D], rows end to end."""
    token = torch.arange(x.shape[0] * x.shape[2], device=x.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return segment.view(x.shape[0], 1, 1, -1), (cu_seqlens[segment + 1] - token).view(x.shape[0], 1, 1, -1)
