"""Products of 8-bit matrices with scales: on a GPU by cuBLAS, which adds sums of at most 128 products in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from pentad.kernels.backend import accumulation_dtype
from pentad.kernels.cublaslt import Scaled, add_product_
from pentad.kernels.fp8.fp8_tensor import TILE, Fp8Tensor

SCALE_ROWS = 4  # cuBLAS reads scales of 128 x 128 tiles in multiples of this many


def fp8_gemm(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a [M, K] times the transpose of b [N, K], as [M, N] of `dtype`; written to `out`, if given."""
    if out is None:
        out = torch.empty(a.values.shape[0], b.values.shape[0], dtype=dtype, device=a.values.device)
    if a.values.is_cuda and dtype != torch.float64:
        _multiply(a, b, out)
        return out
    return out.copy_(_reference(a, b, accumulation_dtype(dtype)))


def accumulate_fp8_gradient_(main: Tensor, dy: Fp8Tensor, x: Fp8Tensor, *, overwrite: bool = False) -> None:
    """main [N, K] += dy [N, T] times the transpose of x [K, T]; with `overwrite`, = instead of +=.

    main is float32, or float64 in exactness tests: no sum is rounded to 16 bits.
    """
    if dy.values.is_cuda and main.dtype == torch.float32:
        if overwrite:
            return _multiply(dy, x, main)
        if _add(main, dy, x):
            return
    product = fp8_gemm(dy, x, main.dtype)
    main.copy_(product) if overwrite else main.add_(product)


def _reference(a: Fp8Tensor, b: Fp8Tensor, wide: torch.dtype) -> Tensor:
    """The sum over the tiles of K of each tile's sum times both scales."""
    depth = a.values.shape[1] // max(a.scales.shape[1], b.scales.shape[1])
    total = torch.zeros(a.values.shape[0], b.values.shape[0], dtype=wide)
    for k in range(0, a.values.shape[1], depth):
        left, right = (each.values[:, k : k + depth].to(wide) for each in (a, b))
        total += left @ right.t() * (_row_scales(a, k).to(wide)[:, None] * _row_scales(b, k).to(wide))
    return total


def _row_scales(a: Fp8Tensor, k: int) -> Tensor:
    """The scale [M] of each row at column k."""
    (m, width), (down, across) = a.values.shape, a.scales.shape
    return a.scales[:, k * across // width].repeat_interleave(m // down)


def _multiply(a: Fp8Tensor, b: Fp8Tensor, out: Tensor) -> None:
    (left, left_kind), (right, right_kind) = _for_cublas(a, b), _for_cublas(b, a)
    kinds = [left_kind.value], [right_kind.value]
    torch._scaled_mm_v2(a.values, b.values.t(), [left], kinds[0], [], [right], kinds[1], [], None, out.dtype, out=out)


def _add(main: Tensor, dy: Fp8Tensor, x: Fp8Tensor) -> bool:
    """Adds the product to main. Returns False if cuBLAS does not do both at once for these operands."""
    return add_product_(main, Scaled(dy.values, *_for_cublas(dy, x)), Scaled(x.values, *_for_cublas(x, dy)))


def _for_cublas(a: Fp8Tensor, other: Fp8Tensor) -> tuple[Tensor, ScalingType]:
    """The scales of `a`, as cuBLAS takes them in a product with `other`."""
    (m, k), (down, across) = a.values.shape, a.scales.shape
    if down == other.scales.shape[0] == 1:
        return a.scales.view(1), ScalingType.TensorWise
    if across == other.scales.shape[1] == 1 and k != TILE:
        return a.scales, ScalingType.RowWise
    if down == m:  # cuBLAS checks the stride of a single column, too, which torch leaves undefined
        return a.scales.as_strided((m, across), (1, m)), ScalingType.BlockWise1x128
    padded = a.scales.new_zeros(down, -(-across // SCALE_ROWS) * SCALE_ROWS)
    padded[:, :across] = a.scales
    return padded.t(), ScalingType.BlockWise128x128
