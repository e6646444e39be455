"""RMSNorms of queries and keys, each head by itself, and the rotation that follows, in place.

See `rms_norm` and `rope_`: on a GPU one pass replaces both, and the copies between them.
"""

import torch
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.backend import DenseRows, triton_on_gpu
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward


@triton_on_gpu
def norm_and_rotate_(
    x: DenseRows, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Norms the heads of x [T, N, D] with weight [D] + offset and rotates them by cos and sin [S, D/2], in place.

    Returns what the backward needs: (the heads as they were [T N, D], rstd [T N]).
    """
    rows = _copy(x)
    normed, _, rstd = rms_norm(rows, weight, eps, None, offset)
    x.copy_(normed.view(x.shape))
    rope_(x, cos, sin)
    return rows, rstd


@triton_on_gpu
def norm_and_rotate_backward_(
    dx: DenseRows, rows: Tensor, weight: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor, offset: float = 0.0
) -> Tensor:
    """The gradient [D] of the weight; dx [T, N, D], the gradient of what `norm_and_rotate_` wrote, becomes that of what
    it read. Tokens are added up in a fixed order."""
    rope_(dx, cos, sin, inverse=True)
    found, dweight = rms_norm_backward(_copy(dx), rows, weight, rstd, None, offset)
    dx.copy_(found.view(dx.shape))
    return dweight


def _copy(heads: Tensor) -> Tensor:
    """[T heads, D], a copy even of a single head, where `reshape` would return a view."""
    return heads.clone(memory_format=torch.contiguous_format).flatten(0, 1)
