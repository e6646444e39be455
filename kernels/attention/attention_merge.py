"""Merges partial attention results that share queries (Ring Attention, arXiv 2310.01889; flash-decoding)."""

import torch

from pentad.kernels.backend import DenseRows, Strided, triton_on_gpu


@triton_on_gpu
def merge_partials_(out: DenseRows, lse: Strided, other: DenseRows, other_lse: Strided) -> None:
    """Adds a partial result to another in place: out [B, N, S, D] and lse [B, N, S], both float32 or wider; `other` may
    be in 16 bits."""
    weight = torch.sigmoid(other_lse - lse)  # of the other part in the new denominator
    out.lerp_(other.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)
