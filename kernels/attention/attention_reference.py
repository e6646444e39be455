"""Partial attention and its backward in torch operations, for any dtype and device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.packed_runs import PackedLengths, PackedRun, backward_by_runs, forward_by_runs
from pentad.kernels.backend import accumulation_dtype

GROUP = 128  # tokens of segments that are computed together on a CPU


class AttentionOptions(NamedTuple):
    """With `causal`, the queries (of each segment) are at the last keys' positions, and see keys up to their own.

    A query does not see keys that are more than `window_left` before its diagonal, on which the last query (of each
    segment) sees the last key. A query of a segment without keys has the output 0 and the lse -inf. With `softcap` c >
    0 a score s becomes c tanh(s / c). Without `fixed_shape`, every call may have another shape: cuDNN, which makes a
    plan for each shape, is then not used.
    """

    causal: bool
    scale: float
    deterministic: bool
    lengths: PackedLengths | None = None
    fixed_shape: bool = True
    window_left: int | None = None
    softcap: float = 0.0

    def within(self, window: int) -> AttentionOptions:
        """These options, for queries that see the last `window` keys up to their own position; 0: all."""
        return self._replace(window_left=window - 1) if window else self


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """The factor of the scores: 1 / sqrt(D) unless given."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def partial_attention_reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, Dv], lse [B, N, S] in float32 or wider). Memory grows with S K; on a CPU, with the longest segment
    and the number of tokens."""
    if not _is_grouped(q, options):
        return _attention(q, k, v, options)
    return forward_by_runs(_attention, _groups(options), q, k, v, options)


def _attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    scores = _masked(_scores(q, k, options), q, k, options)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1).clamp(min=torch.finfo(lse.dtype).min)).exp() @ _expand_kv(v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def partial_attention_backward_reference(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this part, from `dout`, `out` and `lse` of the full attention. Memory as above."""
    if not _is_grouped(q, options):
        return _attention_backward(dout, q, k, v, out, lse, options)
    return backward_by_runs(_attention_backward, _groups(options), dout, q, k, v, out, lse, options)


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    scores = _scores(q, k, options)
    slope = 1.0 - (scores / options.softcap).square() if options.softcap else None
    p = (_masked(scores, q, k, options) - _group_heads(lse.unsqueeze(-1), groups)).exp()  # [B, M, N / M, S, K]
    del scores  # as large as p
    wide = _group_heads(dout, groups)
    dv = p.transpose(-1, -2) @ wide
    delta = (wide * _group_heads(out, groups)).sum(-1, keepdim=True)
    ds = p * (wide @ _expand_kv(v).transpose(-1, -2) - delta) * options.scale
    if slope is not None:
        ds *= slope
    dq = ds @ _expand_kv(k)
    dk = ds.transpose(-1, -2) @ _group_heads(q, groups)
    return dq.flatten(1, 2).to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)


def _is_grouped(q: Tensor, options: AttentionOptions) -> bool:
    """Whether there are segments to compute by themselves. Not on a GPU, where only the device knows where they are."""
    return options.lengths is not None and q.device.type == "cpu" and q.shape[0] * q.shape[2] > GROUP


def _groups(options: AttentionOptions) -> list[PackedRun]:
    """Groups of neighbouring segments with at most GROUP tokens, or with a single longer segment."""
    assert options.lengths is not None
    (cu_q, cu_k, longest, _), groups, first = options.lengths, list[PackedRun](), 0
    queries, keys = cu_q.tolist(), cu_k.tolist()
    for end in range(1, len(queries)):
        if end + 1 < len(queries) and max(ends[end + 1] - ends[first] for ends in (queries, keys)) <= GROUP:
            continue
        at, of = slice(queries[first], queries[end]), slice(keys[first], keys[end])
        its = PackedLengths(cu_q[first : end + 1] - at.start, cu_k[first : end + 1] - of.start, longest)
        groups.append(PackedRun(at, of, its))
        first = end
    return groups


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """[B, N, ...] as [B, M, N / M, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (groups, -1))


def _expand_kv(x: Tensor) -> Tensor:
    """[B, M, ...] as [B, M, 1, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """[B, M, N / M, S, K]"""
    scores = _group_heads(q, k.shape[1]) @ _expand_kv(k).transpose(-1, -2) * options.scale
    return options.softcap * (scores / options.softcap).tanh() if options.softcap else scores


def _masked(scores: Tensor, q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    if not options.causal and options.window_left is None and options.lengths is None:
        return scores
    return scores.masked_fill(~_visible(q, k, options), -math.inf)


def _visible(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """[S, K], or [B, 1, 1, S, K] with segments."""
    if options.lengths is None:
        q_left = torch.arange(q.shape[2], 0, -1, device=q.device).unsqueeze(-1)  # distance to the end
        k_left = torch.arange(k.shape[2], 0, -1, device=q.device)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    else:
        q_segment, q_left = (x.unsqueeze(-1) for x in _segments(options.lengths.cu_seqlens_q, q))
        k_segment, k_left = (x.unsqueeze(-2) for x in _segments(options.lengths.cu_seqlens_k, k))
        visible = q_segment == k_segment
    if options.causal:
        visible = visible & (q_left <= k_left)
    if options.window_left is not None:
        visible = visible & (k_left - q_left <= options.window_left)
    return visible


def _segments(cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(segment, distance to its end), each [B, 1, 1, S], of every token of x [B, heads, S, D], rows end to end."""
    token = torch.arange(x.shape[0] * x.shape[2], device=x.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return segment.view(x.shape[0], 1, 1, -1), (cu_seqlens[segment + 1] - token).view(x.shape[0], 1, 1, -1)


def joined_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Memory for the gradients of q, k and v, each a [B, heads, S, D] view of [B, S, heads, D]: side by side, as a
    layer's products read and write them, if all have the same length and width."""
    if {(x.shape[2], x.shape[3]) for x in (q, k, v)} != {(q.shape[2], q.shape[3])}:
        return [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v)]
    heads = [x.shape[1] for x in (q, k, v)]
    joined = q.new_empty(q.shape[0], q.shape[2], sum(heads), q.shape[3])
    return [part.transpose(1, 2) for part in joined.split(heads, dim=2)]
