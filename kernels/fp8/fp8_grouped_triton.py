"""Products of experts in 8 bits in Triton: a program computes a tile of an expert, which it finds from the offsets."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.fp8 import fp8_grouped as reference
from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor
from pentad.kernels.moe.grouped_gemm_triton import tile_of

TILE = tl.constexpr(fp8_tensor.TILE)
ROWS = 128  # of a program's tile
# Sums of 128 products are accumulated in separate registers: tensor cores add more of them with less precision.
FORWARD: dict[str, Any] = {"ROWS": ROWS, "num_warps": 8, "num_stages": 3}
CAST: dict[str, Any] = {"ROWS": 32, "num_warps": 4}


@triton.jit
def _grouped(
    x, x_scales, index, weights, weight_scales, offsets, y, experts, N, K,
    stride_x, stride_xs, stride_xsk, stride_e, stride_n, stride_se, stride_sn, stride_sk,
    EXPERTS: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """N and K are multiples of TILE, and the values of both operands lie along K."""
    tile, block = tl.program_id(0) // (N // TILE), tl.program_id(0) % (N // TILE)
    expert, row, end = tile_of(tile, offsets, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    own = row < end
    source = row
    if INDEXED:
        source = tl.load(index + row, mask=own, other=0)
    column, depth = block * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    left = x + source.to(tl.int64)[:, None] * stride_x + depth[None, :]
    left_scale = x_scales + source.to(tl.int64) * stride_xs
    right = weights + expert.to(tl.int64) * stride_e + column.to(tl.int64)[None, :] * stride_n + depth[:, None]
    right_scale = weight_scales + expert * stride_se + block * stride_sn
    total = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for k in range(0, K // TILE):
        a = tl.load(left + k * TILE, mask=own[:, None], other=0.0)
        b = tl.load(right + k * TILE)
        scale = tl.load(left_scale + k * stride_xsk, mask=own, other=0.0) * tl.load(right_scale + k * stride_sk)
        total += tl.dot(a, b) * scale[:, None]
    tl.store(y + row.to(tl.int64)[:, None] * N + column[None, :], total.to(y.dtype.element_ty), mask=own[:, None])


@triton.jit
def _dequantize(
    x, scales, index, offsets, y, experts, K, stride_s, stride_sk, INDEXED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    end = tl.load(offsets + experts - 1)
    tile, first = tl.program_id(0) % (K // TILE), tl.program_id(0) // (K // TILE) * ROWS
    if first >= end:
        return
    row, column = first + tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    own = row < end
    source = row
    if INDEXED:
        source = tl.load(index + row, mask=own, other=0)
    source = source.to(tl.int64)
    values = tl.load(x + source[:, None] * K + column[None, :], mask=own[:, None], other=0.0).to(tl.float32)
    scale = tl.load(scales + source * stride_s + tile * stride_sk, mask=own, other=0.0)
    found = (values * scale[:, None]).to(y.dtype.element_ty)
    tl.store(y + row.to(tl.int64)[:, None] * K + column[None, :], found, mask=own[:, None])


def fp8_grouped_gemm(
    x: Fp8Tensor, weights: Fp8Tensor, offsets: Tensor, dtype: torch.dtype, index: Tensor | None = None
) -> Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_grouped.fp8_grouped_gemm`."""
    if dtype == torch.float64:
        return unwrap(reference.fp8_grouped_gemm)(x, weights, offsets, dtype, index)
    experts, n, k = weights.values.shape
    rows = x.values.shape[0] if index is None else index.shape[0]
    assert x.values.shape[1] == k and x.values.stride(1) == 1 and weights.values.stride(2) == 1
    assert n % TILE.value == k % TILE.value == 0 and offsets.shape == (experts,)
    y = torch.empty(rows, n, dtype=dtype, device=offsets.device)
    # Every expert may have one partly filled tile.
    grid = ((ceil_div(rows, ROWS) + experts) * (n // TILE.value),)
    strides = x.values.stride(0), *x.scales.stride(), *weights.values.stride()[:2], *weights.scales.stride()
    each, given = triton.next_power_of_2(experts), index is not None
    _grouped[grid](*x, index, *weights, offsets, y, experts, n, k, *strides, EXPERTS=each, INDEXED=given, **FORWARD)
    return y


def dequantize_rows(x: Fp8Tensor, offsets: Tensor, dtype: torch.dtype, index: Tensor | None = None) -> Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_grouped.dequantize_rows`."""
    if dtype == torch.float64:
        return unwrap(reference.dequantize_rows)(x, offsets, dtype, index)
    k, experts = x.values.shape[1], offsets.shape[0]
    rows = x.values.shape[0] if index is None else index.shape[0]
    assert x.values.is_contiguous() and k % TILE.value == 0
    y = torch.empty(rows, k, dtype=dtype, device=offsets.device)
    _dequantize[(ceil_div(rows, CAST["ROWS"]) * (k // TILE.value),)](
        *x, index, offsets, y, experts, k, *x.scales.stride(), INDEXED=index is not None, **CAST
    )
    return y
