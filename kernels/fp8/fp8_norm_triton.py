"""RMSNorm into 8 bits in Triton: forward a program holds full rows; what is normed again is cut into tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.fp8 import fp8_cast_triton, fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import (
    Out,
    maximum_of,
    new_maxima,
    part_of,
    parts,
    saturate,
    scale_of,
    store_columns,
    store_maximum,
    store_rows,
    twice,
)
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe
from pentad.kernels.rms_norm_triton import PER_THREAD, normed_rows, shape_of

TILE = tl.constexpr(fp8_tensor.TILE)


@triton.jit
def _forward(
    x, residual, weight, values, scales, maxima, summed, rstd, T, eps,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    CAST: tl.constexpr, RECORD: tl.constexpr,
    GIVEN: tl.constexpr, STRIDE: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """With RECORD the maximum of the normed rows raises `maxima`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y, offsets, mask = normed_rows(x, residual, weight, summed, rstd, T, eps, H, ROWS, BLOCK, ADD, OFFSET)
    if RECORD:
        store_maximum(tl.max(tl.abs(y), axis=1), maxima)
    if CAST:
        if GIVEN:
            at = scales + rows * STRIDE
            y = saturate(y * tl.div_rn(1.0, tl.load(at, mask=rows < T, other=1.0))[:, None], LIMIT)
        else:
            by_tile = tl.reshape(y, (ROWS, BLOCK // TILE, TILE))
            scale, inverse = scale_of(tl.max(tl.abs(by_tile), axis=2), LIMIT, POWER)
            tile = tl.arange(0, BLOCK // TILE)
            inside = (rows < T)[:, None] & (tile < H // TILE)[None, :]
            tl.store(scales + tile[None, :] * T + rows[:, None], scale, mask=inside)
            y = tl.reshape(by_tile * inverse[:, :, None], (ROWS, BLOCK))
        tl.store(values + offsets, y.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _normed(summed, weight, rstd, row, column, H, OFFSET: tl.constexpr):
    s = tl.load(summed + row.to(tl.int64)[:, None] * H + column[None, :]).to(tl.float32)
    w = tl.load(weight + column).to(tl.float32) + OFFSET
    return s * tl.load(rstd + row)[:, None] * w[None, :]


@triton.jit
def _again(
    summed, weight, rstd, rows, row_scales, columns, column_scales, T, H, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr, STRIDE: tl.constexpr,
    LIMIT: tl.constexpr, POWER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first_row, first_column, chunk = part_of(tl.program_id(0), H, ROWS + COLUMNS, CHUNK)
    if ROWS:  # noqa: SIM102 - decides what is compiled
        if chunk < TILE:
            row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
            y = _normed(summed, weight, rstd, row, column, H, OFFSET)
            store_rows(y, rows, row_scales, first_column, row, column, T, H, GIVEN, STRIDE, LIMIT, POWER)
    if COLUMNS:  # noqa: SIM102 - decides what is compiled
        if chunk >= TILE * ROWS:
            row, column = first_row + tl.arange(0, TILE), first_column + chunk % TILE + tl.arange(0, CHUNK)
            y = _normed(summed, weight, rstd, row, column, H, OFFSET)
            store_columns(y, columns, column_scales, first_row, row, column, T, H, GIVEN, STRIDE, LIMIT, POWER)


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
    summed, rstd = _launch(x, weight, eps, residual, offset, *out.rows, maxima, CAST=True, **out.common)
    return out.rows, summed, rstd


def rms_norm_amax(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel; see `pentad.kernels.fp8.fp8_norm.rms_norm_amax`."""
    maxima = new_maxima(x)
    none: dict[str, Any] = {"GIVEN": False, "STRIDE": 0, "LIMIT": 1.0, "POWER": False}
    summed, rstd = _launch(x, weight, eps, residual, offset, None, None, maxima, CAST=False, **none)
    return maximum_of(maxima), summed, rstd


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    values: Tensor | None,
    scales: Tensor | None,
    maxima: Tensor | None,
    **constants: Any,
) -> tuple[Tensor, Tensor]:
    """(summed, rstd)"""
    tokens, width = x.shape
    rows, block, warps = shape_of(width, PER_THREAD)
    summed = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _forward[(ceil_div(tokens, rows),)](
        x, residual, weight, values, scales, maxima, summed, rstd, tokens, eps,
        H=width, ROWS=rows, BLOCK=block, ADD=residual is not None, OFFSET=offset,
        RECORD=maxima is not None, **constants, num_warps=warps,
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
    _again[parts(tokens, width, rows + columns)](
        summed, weight, rstd, *out.pointers, tokens, width,
        OFFSET=offset, **out.common, **out.chosen, CHUNK=fp8_cast_triton.CHUNK, num_warps=fp8_cast_triton.WARPS,
    )  # fmt: skip
    return out.forms
