"""Gated linear units into 8 bits in Triton: a program takes a chunk of the gate, and the same of up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_cast_triton, fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import (
    Out,
    maximum_of,
    new_maxima,
    part_of,
    parts,
    store_columns,
    store_maximum,
    store_rows,
    twice,
)
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate

TILE = tl.constexpr(fp8_tensor.TILE)
BACKWARD_CHUNK, BACKWARD_WARPS = 16, 4  # a program holds six chunks of numbers, so fewer of each per thread


@triton.jit
def _product(gate_up, row, column, I, ACT: tl.constexpr):  # noqa: E741
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
    gate = tl.load(gate_up + offsets).to(tl.float32)
    up = tl.load(gate_up + I + offsets).to(tl.float32)
    activated, _, factor, _ = activate(gate, up, ACT)
    return activated * factor


@triton.jit
def _forward(
    gate_up, values, scales, maxima, T, I, ACT: tl.constexpr, RECORD: tl.constexpr,  # noqa: E741
    GIVEN: tl.constexpr, STRIDE: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first_row, first_column, chunk = part_of(tl.program_id(0), I, 1, CHUNK)
    row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
    y = _product(gate_up, row, column, I, ACT)
    store_rows(y, values, scales, first_column, row, column, T, I, GIVEN, STRIDE, LIMIT, POWER)
    if RECORD:
        store_maximum(tl.max(tl.abs(y), axis=1), maxima)


@triton.jit
def _forward_maximum(gate_up, amax, I, ACT: tl.constexpr, CHUNK: tl.constexpr):  # noqa: E741
    first_row, first_column, chunk = part_of(tl.program_id(0), I, 1, CHUNK)
    row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
    store_maximum(tl.max(tl.abs(_product(gate_up, row, column, I, ACT)), axis=1), amax)


@triton.jit
def _gradients(dy, gate_up, row, column, I, ACT: tl.constexpr):  # noqa: E741
    """(y, dgate, dup)"""
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
    gate = tl.load(gate_up + offsets).to(tl.float32)
    up = tl.load(gate_up + I + offsets).to(tl.float32)
    d = tl.load(dy + row.to(tl.int64)[:, None] * I + column[None, :]).to(tl.float32)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    return activated * factor, d * factor * slope, d * activated * factor_slope


@triton.jit
def _backward(
    dy, gate_up, rows, row_scales, columns, column_scales, y, y_scales, maxima, T, I,  # noqa: E741
    ACT: tl.constexpr, Y_LIMIT: tl.constexpr, RECORD: tl.constexpr,
    GIVEN: tl.constexpr, STRIDE: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first_row, first_column, chunk = part_of(tl.program_id(0), I, 2, CHUNK)
    if chunk < TILE:
        row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
        _, dgate, dup = _gradients(dy, gate_up, row, column, I, ACT)
        store_rows(dgate, rows, row_scales, first_column, row, column, T, 2 * I, GIVEN, STRIDE, LIMIT, POWER)
        first = I + first_column
        store_rows(dup, rows, row_scales, first, row, I + column, T, 2 * I, GIVEN, STRIDE, LIMIT, POWER)
        if RECORD:
            store_maximum(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=1), maxima)
    if chunk >= TILE:
        row, column = first_row + tl.arange(0, TILE), first_column + chunk % TILE + tl.arange(0, CHUNK)
        product, dgate, dup = _gradients(dy, gate_up, row, column, I, ACT)
        store_columns(product, y, y_scales, first_row, row, column, T, I, GIVEN, STRIDE, Y_LIMIT, POWER)
        store_columns(dgate, columns, column_scales, first_row, row, column, T, 2 * I, GIVEN, STRIDE, LIMIT, POWER)
        store_columns(dup, columns, column_scales, first_row, row, I + column, T, 2 * I, GIVEN, STRIDE, LIMIT, POWER)


@triton.jit
def _backward_maximum(dy, gate_up, amax, y_amax, I, ACT: tl.constexpr, CHUNK: tl.constexpr):  # noqa: E741
    first_row, first_column, chunk = part_of(tl.program_id(0), I, 1, CHUNK)
    row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
    product, dgate, dup = _gradients(dy, gate_up, row, column, I, ACT)
    store_maximum(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=1), amax)
    store_maximum(tl.max(tl.abs(product), axis=1), y_amax)


def fp8_glu(
    gate_up: Tensor,
    recipe: Recipe,
    act: Activation = "silu",
    amax: Tensor | None = None,
    maxima: Tensor | None = None,
) -> Fp8Tensor:
    """Launches the forward kernel; see `pentad.kernels.fp8.fp8_glu.fp8_glu`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = Out((tokens, width), recipe, "activation", twice(amax), gate_up, True, False)
    assert out.rows is not None
    _forward[parts(tokens, width)](
        gate_up, *out.rows, maxima, tokens, width,
        ACT=act, RECORD=maxima is not None, **out.common, CHUNK=fp8_cast_triton.CHUNK, num_warps=fp8_cast_triton.WARPS,
    )  # fmt: skip
    return out.rows


def fp8_glu_backward(
    dy: Tensor,
    gate_up: Tensor,
    recipe: Recipe,
    act: Activation = "silu",
    amax: tuple[Amax, Tensor] | None = None,
    maxima: Tensor | None = None,
) -> tuple[Fp8Forms, Fp8Tensor]:
    """Launches the backward kernel; see `pentad.kernels.fp8.fp8_glu.fp8_glu_backward`."""
    assert gate_up.shape[1] == 2 * dy.shape[1]
    (tokens, width), (of_gradient, of_y) = dy.shape, amax or (None, None)
    out = Out((tokens, 2 * width), recipe, "gradient", of_gradient, dy, True, True)
    y = Out((tokens, width), recipe, "activation", twice(of_y), dy, False, True)
    assert y.columns is not None
    _backward[parts(tokens, width, 2, BACKWARD_CHUNK)](
        dy, gate_up, *out.pointers, *y.columns, maxima, tokens, width,
        ACT=act, Y_LIMIT=y.common["LIMIT"], RECORD=maxima is not None, **out.common,
        CHUNK=BACKWARD_CHUNK, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return out.forms, y.columns


def glu_amax(gate_up: Tensor, act: Activation = "silu") -> Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_glu.glu_amax`."""
    (tokens, width), maxima = gate_up.shape, new_maxima(gate_up)
    chunk, warps = fp8_cast_triton.CHUNK, fp8_cast_triton.WARPS
    _forward_maximum[parts(tokens, width // 2)](gate_up, maxima, width // 2, ACT=act, CHUNK=chunk, num_warps=warps)
    return maximum_of(maxima)


def glu_backward_amax(dy: Tensor, gate_up: Tensor, act: Activation = "silu") -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_glu.glu_backward_amax`."""
    assert gate_up.shape[1] == 2 * dy.shape[1]
    (tokens, width), maxima = dy.shape, [new_maxima(dy), new_maxima(dy)]
    chunk, warps = BACKWARD_CHUNK, BACKWARD_WARPS
    grid = parts(tokens, width, chunk=chunk)
    _backward_maximum[grid](dy, gate_up, *maxima, width, ACT=act, CHUNK=chunk, num_warps=warps)
    return maximum_of(maxima[0]), maximum_of(maxima[1])
