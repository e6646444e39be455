"""Grouped GEMM in Triton: a program computes one tile of one expert, which it finds from the offsets."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import KernelKey, ceil_div, choose_kernel

WIDE = 512  # columns from which W has wide tiles
ALIGNMENT = 16  # bytes, of the rows and matrices that torch's kernel supports


@triton.jit
def tile_of(tile, offsets, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, its rows in this tile, the end of its rows); the expert is `experts` past the last tile."""
    number = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + number, mask=number < experts, other=0)
    starts = tl.load(offsets + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.where(number < experts, tl.cdiv(ends - starts, ROWS), 0)
    tile_ends = tl.cumsum(tiles, 0)  # tiles up to the end of each expert
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(number == expert, starts, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    first = tl.sum(tl.where(number == expert, tile_ends - tiles, 0), 0)
    return expert, start + (tile - first) * ROWS + tl.arange(0, ROWS), end


@triton.jit
def _grouped(
    x, weights, offsets, y, experts, N, K,
    stride_x, stride_e, stride_n, stride_k,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // tl.cdiv(N, COLUMNS)
    column = tl.program_id(0) % tl.cdiv(N, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    expert, row, end = tile_of(tile, offsets, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    depth = tl.arange(0, DEPTH)
    left = x + row.to(tl.int64)[:, None] * stride_x
    right = weights + expert.to(tl.int64) * stride_e + column.to(tl.int64)[None, :] * stride_n
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, K, DEPTH):
        inner = k + depth
        a = tl.load(left + inner[None, :], mask=(row < end)[:, None] & (inner < K)[None, :], other=0.0)
        b = tl.load(right + inner[:, None] * stride_k, mask=(inner < K)[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    mask = (row < end)[:, None] & (column < N)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * N + column[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _accumulate(
    main, dy, x, offsets, N, K, OVERWRITE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, COLUMNS)
    tiles = tl.cdiv(N, ROWS) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    n = tile // across * ROWS + tl.arange(0, ROWS)
    first_k = tile % across * COLUMNS
    k = first_k + tl.arange(0, COLUMNS)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if not OVERWRITE and start == end:
        return
    row = start + tl.arange(0, DEPTH)
    in_n, in_k = (n < N)[None, :], (k < K)[None, :]
    left, right = dy + row.to(tl.int64)[:, None] * N + n[None, :], x + row.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    whole = start + (end - start) // DEPTH * DEPTH
    for _ in range(start, whole, DEPTH):
        a, b = tl.load(left, mask=in_n, other=0.0), tl.load(right, mask=in_k, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        left += DEPTH * N
        right += DEPTH * K
    if whole < end:
        own = (row + (whole - start) < end)[:, None]
        a, b = tl.load(left, mask=own & in_n, other=0.0), tl.load(right, mask=own & in_k, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    _add(main + expert.to(tl.int64) * N * K, total, n, first_k, N, K, OVERWRITE, ROWS, COLUMNS, PIECES)


@triton.jit
def _add(
    main, total, n, first_k, N, K, OVERWRITE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Adds columns in PIECES, one after another, so that not all of the sum and its target need be in registers."""
    if PIECES > 1:
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _add(main, left, n, first_k, N, K, OVERWRITE, ROWS, COLUMNS // 2, PIECES // 2)
        _add(main, right, n, first_k + COLUMNS // 2, N, K, OVERWRITE, ROWS, COLUMNS // 2, PIECES // 2)
    else:
        k = first_k + tl.arange(0, COLUMNS)
        target = main + n.to(tl.int64)[:, None] * K + k[None, :]
        mask = (n < N)[:, None] & (k < K)[None, :]
        if not OVERWRITE:
            total += tl.load(target, mask=mask, other=0.0)
        tl.store(target, total, mask=mask)


def _shape(dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes: 16-bit rows use tensor cores; float32 is multiplied in full precision, in smaller tiles."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "PRECISION": "tf32", "num_warps": 8, "num_stages": 3}


def _wgrad_shape(dtype: torch.dtype, k: int) -> dict[str, Any]:
    """Tile sizes for W with K columns: wide tiles read less, and add their sums in pieces, as these fill the
    registers."""
    if dtype == torch.float32 or k < WIDE:
        return _shape(dtype) | {"PIECES": 1 if dtype == torch.float32 else 4}
    wide = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 32, "PIECES": 4}
    return wide | {"PRECISION": "tf32", "num_warps": 8, "num_stages": 4}


def grouped_gemm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Launches torch's kernel or ours; see `pentad.kernels.moe.grouped_gemm.grouped_gemm`."""
    if choose_kernel(serving_kernels(x, weights), grouped_key(weights)) == "torch":
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    (rows, k), (experts, n, _) = x.shape, weights.shape
    assert weights.shape[2] == k and offsets.shape == (experts,)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    shape = _shape(x.dtype)
    # Every expert may have one partly filled tile.
    tiles = ceil_div(rows, shape["ROWS"]) + experts
    grid = (tiles * ceil_div(n, shape["COLUMNS"]),)
    each = triton.next_power_of_2(experts)
    _grouped[grid](x, weights, offsets, y, experts, n, k, x.stride(0), *weights.stride(), EXPERTS=each, **shape)
    return y


def serving_kernels(x: Tensor, weights: Tensor) -> tuple[str, ...]:
    """The implementations that serve a product, of which the first is usually the fastest."""
    return ("torch", "triton") if _torch_supports(x, weights) else ("triton",)


def grouped_key(weights: Tensor) -> KernelKey:
    """The key of a product with weights [E, N, K]; transposed weights have another one."""
    return "grouped_gemm" + "_transposed" * (weights.stride(2) != 1), *weights.shape


def _torch_supports(x: Tensor, weights: Tensor) -> bool:
    """Whether torch has a kernel that reads the offsets on the device; otherwise it loops over them on the host."""
    divisible = all(width * x.element_size() % ALIGNMENT == 0 for width in weights.shape[1:])
    aligned = divisible and x.data_ptr() % ALIGNMENT == 0 and weights.data_ptr() % ALIGNMENT == 0
    return x.dtype == torch.bfloat16 and x.shape[0] > 0 and aligned and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def accumulate_grouped_gradient_(
    main: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, overwrite: bool = False
) -> None:
    """Launches the kernel; see `pentad.kernels.moe.grouped_gemm.accumulate_grouped_gradient_`."""
    experts, n, k = main.shape
    assert dy.shape[1] == n and x.shape[1] == k and offsets.shape == (experts,)
    shape = _wgrad_shape(dy.dtype, k)
    grid = (experts * ceil_div(n, shape["ROWS"]) * ceil_div(k, shape["COLUMNS"]),)
    _accumulate[grid](main, dy, x, offsets, n, k, OVERWRITE=overwrite, **shape)
