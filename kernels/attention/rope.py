"""Rotary position embedding (arXiv 2104.09864), in place.

In the half-split form: pair i of a head is (x[i], x[i + D/2]). A rotation is orthogonal, so its backward is the inverse
rotation.
"""

import torch
from torch import Tensor

from pentad.kernels.backend import DenseRows, accumulation_dtype, triton_on_gpu


@triton_on_gpu
def rope_(x: DenseRows, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
    """Rotates the heads of x [T, N, D] in place by the position t % S of token t, back with `inverse`.

    cos and sin [S, D/2] are from `rope_tables`.
    """
    wide = accumulation_dtype(x.dtype)
    half = x.shape[2] // 2
    position = torch.arange(x.shape[0], device=x.device) % cos.shape[0]
    c = cos[position][:, None].to(wide)
    s = sin[position][:, None].to(wide)
    if inverse:
        s = -s
    a, b = x[..., :half].to(wide), x[..., half:].to(wide)
    rotated = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    x.copy_(rotated)
