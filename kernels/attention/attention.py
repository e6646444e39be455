"""Causal grouped-query attention as an explicit forward and backward.

On Hopper cuDNN is usually fastest, but as torch calls it, its backward sums dq in an order that changes from run to
run, even in torch's deterministic mode (torch 2.11 with cuDNN 9.19). With `deterministic=True` the backward is one with
a fixed order: cuDNN's by its Python frontend, ours, or flash attention's deterministic mode; see `attention_partial`.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentad.kernels.attention.attention_partial import (
    QKVGrads,
    has_fused_kernel,
    partial_attention,
    partial_attention_backward,
)
from pentad.kernels.attention.attention_reference import AttentionOptions, softmax_scale
from pentad.kernels.backend import kernels_name


class SavedAttention(NamedTuple):
    """What the backward needs. Without a fused kernel `out` has an autograd graph, which ends at `inputs`, and `lse` is
    None."""

    out: Tensor  # [B, N, S, Dv]
    lse: Tensor | None  # [B, N, S] float32
    inputs: tuple[Tensor, Tensor, Tensor]
    options: AttentionOptions


def attention(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False, scale: float | None = None
) -> tuple[Tensor, SavedAttention]:
    """(out [B, N, S, Dv], what the backward needs) of q [B, N, S, D], k [B, M, K, D], v [B, M, K, Dv]; M divides N.

    The queries are at the last S of the K positions, and see keys up to their own. Values may be narrower than keys.
    `scale` multiplies the scores, 1 / sqrt(D) unless given. Inputs may be strided views with a contiguous last
    dimension, and must stay unchanged until the backward.
    """
    options = causal_options(q, deterministic, scale)
    if has_fused_kernel(q, v) or (q.is_cuda and kernels_name() == "torch"):
        out, lse = partial_attention(q, k, v, options)
        return out, SavedAttention(out, lse, (q, k, v), options)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    square, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
    # Plain GEMMs always add in the same order.
    backend = sdpa_kernel(SDPBackend.MATH) if q.is_cuda and deterministic else nullcontext()
    with torch.enable_grad(), backend:
        # torch's `is_causal` aligns the mask at the first key.
        mask = None if square else _lower_right_mask(q, k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=square, scale=scale, enable_gqa=grouped)
    return out.detach(), SavedAttention(out, None, (q, k, v), options)


def causal_options(q: Tensor, deterministic: bool, scale: float | None) -> AttentionOptions:
    """The options of `attention`, which its backward needs as well."""
    return AttentionOptions(True, softmax_scale(q, scale), deterministic)


def _lower_right_mask(q: Tensor, keys: int) -> Tensor:
    """The causal mask of queries q at the last of `keys` positions."""
    queries = q.shape[2]
    if not q.is_cuda:
        return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: seconds of every rank's start-up

    return causal_lower_right(queries, keys)


def attention_backward(dout: Tensor, saved: SavedAttention) -> QKVGrads:
    """(dq, dk, dv) from dout [B, N, S, Dv]. Frees the autograd graph, if there is one, so it may be called only
    once."""
    if saved.lse is not None:
        return partial_attention_backward(dout, *saved.inputs, saved.out, saved.lse, saved.options)
    from torch.autograd.graph import _engine_run_backward  # private: only ranks without a fused kernel depend on it

    # `torch.autograd.grad` without its check of shapes, which imports sympy: half a second of every rank's start-up.
    dq, dk, dv = _engine_run_backward((saved.out,), (dout,), False, False, saved.inputs, accumulate_grad=False)
    return dq, dk, dv
