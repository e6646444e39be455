"""RMSNorm into 8 bits in Triton: in the forward a program holds full rows; rows that are normed again are cut into
tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import (
    Out,
    load,
    maximum_of,
    new_maxima,
    part_of,
    programs,
    rows_of,
    store_columns,
    store_maximum,
    store_quads,
    store_rows,
    twice,
)
from pentad.kernels.fp8.fp8_scaling_triton import Scaling, saturate, scale_of
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe
from pentad.kernels.rms_norm_triton import PER_THREAD, normed_rows, shape_of

TILE = tl.constexpr(fp8_tensor.TILE)


@triton.jit
def _forward(
    x, residual, weight, out, maxima, summed, rstd, T, eps,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    CAST: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Raises `maxima`, if given, to the maximum of the normed rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y, offsets, mask = normed_rows(x, residual, weight, summed, rstd, T, eps, H, ROWS, BLOCK, ADD, OFFSET)
    if maxima is not None:
        store_maximum(tl.abs(y), maxima)
    if CAST:
        values, scales, amax = out
        if SCALING.given:
            found = tl.load(amax + rows * SCALING.stride, mask=rows < T, other=1.0)
            scale, inverse = scale_of(found, SCALING.limit, SCALING.power_of_two)
            tl.store(scales + rows * SCALING.stride, scale, mask=rows < T)
            y = saturate(y * inverse[:, None], SCALING.limit)
        else:
            by_tile = tl.reshape(y, (ROWS, BLOCK // TILE, TILE))
            scale, inverse = scale_of(tl.max(tl.abs(by_tile), axis=2), SCALING.limit, SCALING.power_of_two)
            tile = tl.arange(0, BLOCK // TILE)
            inside = (rows < T)[:, None] & (tile < H // TILE)[None, :]
            tl.store(scales + tile[None, :] * T + rows[:, None], scale, mask=inside)
            y = tl.reshape(by_tile * inverse[:, :, None], (ROWS, BLOCK))
        tl.store(values + offsets, y.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _normed(summed, weight, rstd, row, column, H, OFFSET: tl.constexpr):
    w = tl.load(weight + column).to(tl.float32) + OFFSET
    return load(summed, row, column, H) * tl.load(rstd + row)[:, None] * w[None, :]


@triton.jit
def _again(
    summed, weight, rstd, rows, columns, T, H,
    OFFSET: tl.constexpr, PARTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    row, column = part_of(H, PARTS)
    at, across = rows_of(row, PARTS), column + tl.arange(0, PARTS.width)
    a = _normed(summed, weight, rstd, at, across, H, OFFSET)
    if PARTS.columns:
        b = _normed(summed, weight, rstd, at + 1, across, H, OFFSET)
        c = _normed(summed, weight, rstd, at + 2, across, H, OFFSET)
        d = _normed(summed, weight, rstd, at + 3, across, H, OFFSET)
        if PARTS.rows:
            store_quads((a, b, c, d), rows, at, column, T, H, SCALING)
        store_columns((a, b, c, d), columns, row, column, T, H, SCALING)
    else:
        store_rows(a, rows, at, column, T, H, SCALING)


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
    """Launches the forward kernel; see `pentad.kernels.fp8.fp8_norm.fp8_rms_norm`."""
    out = Out((x.shape[0], x.shape[1]), recipe, "activation", twice(amax), x, True, False)
    assert out.rows is not None
    summed, rstd = _launch(x, weight, eps, residual, offset, out.operands[0], maxima, out.scaling)
    return out.rows, summed, rstd


def rms_norm_amax(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel; see `pentad.kernels.fp8.fp8_norm.rms_norm_amax`."""
    maxima = new_maxima(x)
    summed, rstd = _launch(x, weight, eps, residual, offset, None, maxima, None)
    return maximum_of(maxima), summed, rstd


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    out: tuple[Tensor | None, ...] | None,
    maxima: Tensor | None,
    scaling: Scaling | None,
) -> tuple[Tensor, Tensor]:
    """(summed, rstd)"""
    tokens, width = x.shape
    rows, block, warps = shape_of(width, PER_THREAD)
    summed = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _forward[(ceil_div(tokens, rows),)](
        x, residual, weight, out, maxima, summed, rstd, tokens, eps,
        H=width, ROWS=rows, BLOCK=block, ADD=residual is not None, OFFSET=offset,
        CAST=scaling is not None, SCALING=scaling, num_warps=warps,
    )  # fmt: skip
    return summed, rstd


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
    """Launches the kernel; see `pentad.kernels.fp8.fp8_norm.fp8_normed`."""
    tokens, width = summed.shape
    out = Out((tokens, width), recipe, "activation", amax, summed, rows, columns)
    for parts in out.parts():
        _again[programs(tokens, width, parts)](
            summed, weight, rstd, *out.operands, tokens, width,
            OFFSET=offset, PARTS=parts, SCALING=out.scaling, num_warps=parts.warps,
        )  # fmt: skip
    return out.forms
