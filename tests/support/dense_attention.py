"""Causal attention in plain torch, with autograd: the reference for all attention kernels and context parallelism."""

import math

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D) under the causal mask) v of q [B, N, S, D], k [B, M, K, D], v [B, M, K, Dv].

    Queries are the last S positions. `scale` replaces 1 / sqrt(D). Positions with different indices in `documents` [B,
    K] do not attend to each other; with a `window`, queries see that many keys up to their own. `sinks` [N] are
    further scores without a value.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (1.0 / math.sqrt(q.shape[3]) if scale is None else scale)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    if documents is not None:
        hidden = hidden | (documents[:, None, -q.shape[2] :, None] != documents[:, None, None, :])
    if window:
        hidden = hidden | torch.ones_like(hidden).tril(k.shape[2] - q.shape[2] - window)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v
