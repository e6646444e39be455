"""Casts to 8 bits, to both forms in one pass, and transposes of 8-bit matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Recipe, Role, quantize, record


@triton_on_gpu
def fp8_cast(
    x: Tensor,
    recipe: Recipe,
    role: Role,
    amax: Amax | None = None,
    *,
    rows: bool = True,
    columns: bool = True,
    maxima: Tensor | None = None,
) -> Fp8Forms:
    """The requested forms of x [T, K]. Scales other than those of blocks need `amax`.

    T and K are multiples of 128, and x and the maxima of `amax` are contiguous. A cast of rows can `record` the maximum
    of x in `maxima`.
    """
    assert rows or maxima is None
    assert x.is_contiguous()
    record(x, maxima)
    return forms_of(x, recipe, role, amax, rows=rows, columns=columns)


def forms_of(
    x: Tensor, recipe: Recipe, role: Role, amax: Amax | None = None, *, rows: bool = True, columns: bool = True
) -> Fp8Forms:
    """The forms of x [T, K] by the reference."""
    assert amax is None or all(each.is_contiguous() for each in amax)
    return Fp8Forms(
        quantize(x, recipe, role, amax and amax.rows) if rows else None,
        quantize(x.t(), recipe, role, amax and amax.columns) if columns else None,
    )


@triton_on_gpu
def fp8_transpose(values: Tensor) -> Tensor:
    """values [T, K] of 8 bits as [K, T], contiguous; T and K are multiples of 128."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)
