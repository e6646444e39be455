"""Attention sinks: one more column of scores per head, whose weight is dropped after the softmax (gpt-oss; arXiv
2309.17453).

A sink is a partial attention with a score of its own and a value of zero, so it is merged like any other, after all
keys. `out` and `lse` are then those of the full attention, which is all that the backward of the other parts needs.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, D], lse [B, N, S]) of attention with sinks [N], from those without."""
    score = sinks.to(lse.dtype)[:, None]
    return (out * torch.sigmoid(lse - score).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, score)


def sinks_backward(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [N] of the sinks, in the dtype of `lse`; `out` and `lse` are those with sinks."""
    delta = (dout.to(lse.dtype) * out).sum(-1)
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2))
