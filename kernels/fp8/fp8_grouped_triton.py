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
# Each sum of 128 products is added up in registers of its own: tensor cores add more of them with less precision.
FORWARD: dict[str, Any] = {"ROWS": ROWS, "num_warps": 8, "num_stages": 3}
BACKWARD: dict[str, Any] = {"DEPTH": 64, "num_warps": 8, "num_stages": 3}
COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}


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
def _accumulate(
    main, dy, dy_scales, dy_index, x, x_scales, x_index, offsets, N, K,
    stride_ds, stride_dsn, stride_xs, stride_xsk,
    OVERWRITE: tl.constexpr, DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = K // TILE
    tiles = N // TILE * across
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n, k = tile // across * TILE + tl.arange(0, TILE), tile % across * TILE + tl.arange(0, TILE)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if not OVERWRITE and start == end:
        return
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for first in range(start, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        own = row < end
        left, right = row, row
        if DY_INDEXED:
            left = tl.load(dy_index + row, mask=own, other=0)
        if X_INDEXED:
            right = tl.load(x_index + row, mask=own, other=0)
        left, right = left.to(tl.int64), right.to(tl.int64)
        a = tl.load(dy + left[:, None] * N + n[None, :], mask=own[:, None], other=0.0)
        b = tl.load(x + right[:, None] * K + k[None, :], mask=own[:, None], other=0.0)
        scale = tl.load(dy_scales + left * stride_ds + tile // across * stride_dsn, mask=own, other=0.0)
        scale *= tl.load(x_scales + right * stride_xs + tile % across * stride_xsk, mask=own, other=0.0)
        scaled = (b.to(tl.float32) * scale[:, None]).to(COMPUTE)
        total = tl.dot(tl.trans(a.to(tl.float32).to(COMPUTE)), scaled, total, input_precision=PRECISION)
    target = main + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    if not OVERWRITE:
        total += tl.load(target)
    tl.store(target, total)


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


def accumulate_fp8_grouped_gradient_(
    dy: Fp8Tensor,
    x: Fp8Tensor,
    main: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    indices: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    overwrite: bool = False,
) -> None:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_grouped.accumulate_fp8_grouped_gradient_`."""
    if main.dtype == torch.float64:
        unwrap(reference.accumulate_fp8_grouped_gradient_)(dy, x, main, offsets, dtype, indices, overwrite=overwrite)
        return
    experts, n, k = main.shape
    assert main.is_contiguous() and dy.values.is_contiguous() and x.values.is_contiguous()
    assert dy.values.shape[1] == n and x.values.shape[1] == k and n % TILE.value == k % TILE.value == 0
    precision = "ieee" if dtype == torch.float32 else "tf32"
    of_dy, of_x = (each is not None for each in indices)
    _accumulate[(experts * (n // TILE.value) * (k // TILE.value),)](
        main, *dy, indices[0], *x, indices[1], offsets, n, k, *dy.scales.stride(), *x.scales.stride(),
        OVERWRITE=overwrite, DY_INDEXED=of_dy, X_INDEXED=of_x, COMPUTE=COMPUTE[dtype], PRECISION=precision, **BACKWARD,
    )  # fmt: skip
