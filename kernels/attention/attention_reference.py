"""One part of an attention and its backward pass written out in torch operations, for any dtype and device."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype


class PackedLengths(NamedTuple):
    """Pieces that see nothing of each other: where those of the rows, one row behind the other, begin and end.

    `queries` and `keys` are [pieces + 1] int32 on the device, `longest` the most of each in one piece.
    """

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]


class AttentionOptions(NamedTuple):
    """`causal`: the queries (of each piece) are of its last keys' positions, and see those up to their own.

    `steady`: the shapes are the same in every call. Without it cuDNN is not asked, which plans anew for every shape.
    """

    causal: bool
    scale: float
    deterministic: bool
    lengths: PackedLengths | None = None
    steady: bool = True


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """What scores are multiplied by: 1 / sqrt(D), where nothing else is asked for."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def partial_attention_reference(q: Tensor, k: Tensor, v: Tensor, rule: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, Dv], lse [B, N, S] in float32 or wider); memory grows with S K."""
    scores = _scores(q, k, rule)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _shared(v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def partial_attention_backward_reference(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a part, where `dout`, `out` and `lse` are those of the whole."""
    groups = k.shape[1]
    p = (_scores(q, k, rule) - _grouped(lse.unsqueeze(-1), groups)).exp()  # [B, M, N / M, S, K]
    wide = _grouped(dout, groups)
    dv = p.transpose(-1, -2) @ wide
    drift = (wide * _grouped(out, groups)).sum(-1, keepdim=True)
    ds = p * (wide @ _shared(v).transpose(-1, -2) - drift) * rule.scale
    dq = ds @ _shared(k)
    dk = ds.transpose(-1, -2) @ _grouped(q, groups)
    return dq.flatten(1, 2).to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, N, ...] as [B, M, N / M, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (groups, -1))


def _shared(x: Tensor) -> Tensor:
    """[B, M, ...] as [B, M, 1, ...], in the dtype of sums."""
    return x.to(accumulation_dtype(x.dtype)).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, rule: AttentionOptions) -> Tensor:
    """[B, M, N / M, S, K]"""
    scores = _grouped(q, k.shape[1]) @ _shared(k).transpose(-1, -2) * rule.scale
    return scores.masked_fill(~_visible(q, k, rule.lengths), -math.inf) if rule.causal else scores


def _visible(q: Tensor, k: Tensor, lengths: PackedLengths | None) -> Tensor:
    """[S, K], or with pieces [B, 1, 1, S, K]."""
    if lengths is None:
        whole = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return whole.tril(k.shape[2] - q.shape[2])
    (piece, left), (of, before) = (
        (number.view(q.shape[0], 1, 1, -1), rest.view(q.shape[0], 1, 1, -1))
        for number, rest in (_numbered(lengths.queries, q), _numbered(lengths.keys, k))
    )
    return (piece.unsqueeze(-1) == of.unsqueeze(-2)) & (left.unsqueeze(-1) <= before.unsqueeze(-2))


def _numbered(ends: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token of x [B, heads, S, D]: its piece, and how far it is from the piece's end."""
    token = torch.arange(x.shape[0] * x.shape[2], device=x.device, dtype=ends.dtype)
    piece = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    return piece, ends[piece + 1] - token
