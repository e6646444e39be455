"""Causal attention with grouped queries as an explicit forward and backward: one block, whose keys are all there are.

On Hopper cuDNN is the fastest by far, but its backward adds up dq in an order that changes from run to run, in torch's
deterministic mode as well (2.11 with cuDNN 9.19: two runs differ in bits). `deterministic=True` therefore takes flash
attention in its deterministic mode, at 0.41 of cuDNN's speed (forward and backward, S = 8192, D = 128).
"""

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentad.kernels.attention.attention_partial import has_fused_kernel, partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import AttentionOptions, softmax_scale


class SavedAttention(NamedTuple):
    """What one backward pass needs. Where no fused kernel took the inputs `out` has its graph, which ends at them, and
    there is no `lse`."""

    out: Tensor  # [B, N, S, Dv]
    lse: Tensor | None  # [B, N, S] float32
    inputs: tuple[Tensor, Tensor, Tensor]
    rule: AttentionOptions


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, documents: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D) under the causal mask) v, written out; memory grows with S K.

    `scale` stands for 1 / sqrt(D); positions with different numbers in `documents` [B, K] do not see each other.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * softmax_scale(q, scale)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    if documents is not None:
        hidden = hidden | (documents[:, None, -q.shape[2] :, None] != documents[:, None, None, :])
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def attention(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False, scale: float | None = None
) -> tuple[Tensor, SavedAttention]:
    """(out [B, N, S, D], what the backward pass needs) of q [B, N, S, D], k and v [B, M, K, D], where M divides N.

    The queries are of the last S of the K positions, and see those up to their own. Values, and with them `out`, may be
    narrower than keys; `scale` is what scores are multiplied by, 1 / sqrt(D) unless given.
    The inputs may be strided views with a contiguous last dimension and must stay unchanged until the backward pass.
    """
    rule = AttentionOptions(True, softmax_scale(q, scale), deterministic)
    if has_fused_kernel(q, v):
        out, lse = partial_attention(q, k, v, rule)
        return out, SavedAttention(out, lse, (q, k, v), rule)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    whole, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
    # plain GEMMs, which always add in the same order
    plain = sdpa_kernel(SDPBackend.MATH) if q.is_cuda and deterministic else nullcontext()
    with torch.enable_grad(), plain:
        # torch's own flag counts from the first key
        mask = None if whole else _lower_right_mask(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=grouped)
    return out.detach(), SavedAttention(out, None, (q, k, v), rule)


def _lower_right_mask(queries: int, keys: int) -> Tensor:
    """The causal mask of the last `queries` of `keys` positions."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: a second of every rank's start-up

    return causal_lower_right(queries, keys)


def attention_backward(dout: Tensor, saved: SavedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from dout [B, N, S, D]; frees a graph, so that a second call with `saved` would be an error."""
    if saved.lse is not None:
        return partial_attention_backward(dout, *saved.inputs, saved.out, saved.lse, saved.rule)
    dq, dk, dv = torch.autograd.grad(saved.out, saved.inputs, dout)
    return dq, dk, dv
