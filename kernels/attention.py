"""Causal attention with grouped queries, on the fastest backend of torch, as an explicit forward and backward.

On Hopper cuDNN is the fastest backend by far, but its backward adds up dq in an order that changes from run to run, in
torch's deterministic mode as well (2.11 with cuDNN 9.19: two runs differ in bits). `deterministic=True` therefore
takes the flash backend in its deterministic mode, at 0.41 of cuDNN's speed (forward and backward, S = 8192, D = 128).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.deterministic as determinism
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# The flash backend takes 16-bit dtypes; what it refuses goes to plain GEMMs, which always add in the same order.
REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
# A property that torch puts on its module at run time, where no type checker sees it.
FILL = "fill_uninitialized_memory"


class SavedAttention(NamedTuple):
    """What one backward pass needs: the output with its graph, and the inputs at which the graph ends."""

    out: Tensor
    inputs: tuple[Tensor, Tensor, Tensor]
    deterministic: bool


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


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """What scores are multiplied by: 1 / sqrt(D), where nothing else is asked for."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def attention(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False, scale: float | None = None
) -> tuple[Tensor, SavedAttention]:
    """(out [B, N, S, D], what the backward pass needs) of q [B, N, S, D], k and v [B, M, K, D], where M divides N.

    The queries are of the last S of the K positions, and see those up to their own. Values, and with them `out`, may be
    narrower than keys; `scale` is what scores are multiplied by, 1 / sqrt(D) unless given.
    The inputs may be strided views with a contiguous last dimension and must stay unchanged until the backward pass.
    """
    backends = REPRODUCIBLE if deterministic else FASTEST
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    whole, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
    with torch.enable_grad(), sdpa_kernel(backends, set_priority=True) if q.is_cuda else nullcontext():
        # torch's own flag counts from the first key, its flash kernel from the last one, as `causal_lower_right` says
        mask = None if whole else causal_lower_right(q.shape[2], k.shape[2])
        # the flash backend wants one width; what stands in columns of zeros is zero, and so is its gradient
        narrow = q.shape[3] - v.shape[3] if deterministic and fusable(q) else 0
        wide = F.pad(v, (0, narrow)) if narrow else v
        out = F.scaled_dot_product_attention(q, k, wide, mask, is_causal=whole, scale=scale, enable_gqa=grouped)
        out = out[..., : v.shape[3]] if narrow else out
    return out.detach(), SavedAttention(out, (q, k, v), deterministic)


def fusable(q: Tensor) -> bool:
    """True where fused kernels take the dtype; they need a GPU."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@contextmanager
def reproducible() -> Iterator[None]:
    """Asks torch for reproducible algorithms, without its habit of filling fresh memory."""
    mode = torch.get_deterministic_debug_mode()
    fill = getattr(determinism, FILL)
    torch.set_deterministic_debug_mode("error")
    setattr(determinism, FILL, False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        setattr(determinism, FILL, fill)


def attention_backward(dout: Tensor, saved: SavedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from dout [B, N, S, D]; frees what the graph held, so a second call with `saved` is an error."""
    # Plain GEMMs need no asking, and torch would refuse them without a setting of the process's environment.
    with reproducible() if saved.deterministic and fusable(dout) else nullcontext():
        dq, dk, dv = torch.autograd.grad(saved.out, saved.inputs, dout)
    return dq, dk, dv
