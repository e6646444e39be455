"""RMSNorm that writes its result only in 8 bits, never in 16."""

from __future__ import annotations

from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu
from pentad.kernels.fp8.fp8_cast import forms_of
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, absolute_maximum, quantize, record
from pentad.kernels.rms_norm import rms_norm


@triton_on_gpu
def fp8_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    recipe: Recipe,
    amax: Tensor | None = None,
    residual: Tensor | None = None,
    offset: float = 0.0,
    maxima: Tensor | None = None,
) -> tuple[Fp8Tensor, Tensor, Tensor]:
    """(the normed rows [T, H] for products over H, summed, rstd) as in `rms_norm`, scaled by the `amax` of the rows;
    their own maximum goes to `maxima` (see `record`)."""
    wide = accumulation_dtype(x.dtype)
    _, summed, rstd = rms_norm(x, weight, eps, residual, offset)
    normed = _normed(summed.to(wide), weight, rstd, offset)
    record(normed, maxima)
    return quantize(normed, recipe, "activation", amax), summed, rstd


@triton_on_gpu
def rms_norm_amax(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(the absolute maximum [1, 1] of the normed rows, summed [T, H], rstd [T]): all but the rows, which `fp8_normed`
    casts once the maximum of the whole tensor is known."""
    _, summed, rstd = rms_norm(x, weight, eps, residual, offset)
    return absolute_maximum(_normed(summed.to(rstd.dtype), weight, rstd, offset)), summed, rstd


@triton_on_gpu
def fp8_normed(
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    recipe: Recipe,
    amax: Amax | None = None,
    offset: float = 0.0,
    *,
    rows: bool = True,
    columns: bool = True,
) -> Fp8Forms:
    """The normed rows again, from what `fp8_rms_norm` returned, in the requested forms, [T, H] and [H, T]."""
    normed = _normed(summed.to(rstd.dtype), weight, rstd, offset)
    return forms_of(normed, recipe, "activation", amax, rows=rows, columns=columns)


def _normed(summed: Tensor, weight: Tensor, rstd: Tensor, offset: float) -> Tensor:
    return summed * rstd[:, None] * (weight.to(summed.dtype) + offset)
