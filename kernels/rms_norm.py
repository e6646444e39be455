"""RMSNorm with a fused residual addition, forward and backward.

summed = x + residual, y = summed * rstd * (weight + offset) with rstd = 1 / sqrt(mean(summed^2) + eps). `y` is computed
from the *rounded* sum, as that is what the next layer and the backward see.
"""

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu


@triton_on_gpu
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Divides the rows of x [T, H] (+ residual [T, H]) by their root mean square and multiplies them by weight [H] +
    offset. Gemma stores weights minus 1, which keeps their digits in 16 bits.

    Returns (y [T, H], summed [T, H], rstd [T] float32, or float64 for float64 x). Without a residual `summed` is x
    itself.
    """
    summed = x if residual is None else x + residual
    wide = summed.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd[:, None] * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype), summed, rstd


@triton_on_gpu
def rms_norm_backward(
    dy: Tensor,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None = None,
    offset: float = 0.0,
    again: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: (dx [T, H] with respect to `summed`, dweight [H] in the dtype of rstd).

    `dresidual` [T, H], the gradient of `summed` along the residual stream, is added to dx in the same pass, which also
    writes the y [T, H] of `rms_norm` to `again`, with the same bits. dweight is summed over tokens in a fixed order, so
    two runs are bit-equal.
    """
    wide = dy.to(rstd.dtype)
    normed = summed.to(rstd.dtype) * rstd[:, None]
    scale = weight.to(rstd.dtype) + offset
    if again is not None:
        again.copy_(normed * scale)
    g = wide * scale
    dx = rstd[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual
    return dx.to(summed.dtype), (wide * normed).sum(0)
