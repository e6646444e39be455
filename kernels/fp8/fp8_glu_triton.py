"""Gated linear units into 8 bits in Triton: a program takes a block of the gate and the matching block of up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_blockwise_gluon, fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import (
    ROW_PARTS,
    Out,
    Parts,
    largest,
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
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate

TILE = tl.constexpr(fp8_tensor.TILE)
# A program of the backward pass holds six times as many numbers as one of a cast.
GIVEN_PARTS = Parts(8, 64, 2)
ROWS_BACK, COLUMNS_BACK = Parts(4, 128, 4, columns=False), Parts(32, 16, 4, rows=False)


@triton.jit
def _product(gate_up, row, column, I, ACT: tl.constexpr):  # noqa: E741
    gate, up = load(gate_up, row, column, 2 * I), load(gate_up + I, row, column, 2 * I)
    activated, _, factor, _ = activate(gate, up, ACT)
    return activated * factor


@triton.jit
def _forward(
    gate_up, out, maxima, T, I,  # noqa: E741
    ACT: tl.constexpr, PARTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    row, column = part_of(I, PARTS)
    rows = rows_of(row, PARTS)
    y = _product(gate_up, rows, column + tl.arange(0, PARTS.width), I, ACT)
    store_rows(y, out, rows, column, T, I, SCALING)
    if maxima is not None:
        store_maximum(tl.abs(y), maxima)


@triton.jit
def _forward_maximum(gate_up, amax, I, ACT: tl.constexpr, PARTS: tl.constexpr):  # noqa: E741
    row, column = part_of(I, PARTS)
    y = _product(gate_up, rows_of(row, PARTS), column + tl.arange(0, PARTS.width), I, ACT)
    store_maximum(tl.abs(y), amax)


@triton.jit
def _gradients(dy, gate_up, row, column, I, ACT: tl.constexpr, ROUND: tl.constexpr):  # noqa: E741
    """(y, dgate, dup)"""
    gate, up = load(gate_up, row, column, 2 * I), load(gate_up + I, row, column, 2 * I)
    d = load(dy, row, column, I)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    y, dgate, dup = activated * factor, d * factor * slope, d * activated * factor_slope
    if ROUND:
        dtype = dy.dtype.element_ty
        y, dgate, dup = y.to(dtype).to(tl.float32), dgate.to(dtype).to(tl.float32), dup.to(dtype).to(tl.float32)
    return y, dgate, dup


@triton.jit
def _backward(
    dy, gate_up, rows, columns, y, maxima, T, I,  # noqa: E741
    ACT: tl.constexpr, PARTS: tl.constexpr, GRADIENTS: tl.constexpr, OF_Y: tl.constexpr,
):  # fmt: skip
    ROUND: tl.constexpr = not GRADIENTS.given
    row, column = part_of(I, PARTS)
    at, across = rows_of(row, PARTS), column + tl.arange(0, PARTS.width)
    ya, gate_a, up_a = _gradients(dy, gate_up, at, across, I, ACT, ROUND)
    largest_gradient = tl.maximum(tl.abs(gate_a), tl.abs(up_a))
    if PARTS.columns:
        yb, gate_b, up_b = _gradients(dy, gate_up, at + 1, across, I, ACT, ROUND)
        yc, gate_c, up_c = _gradients(dy, gate_up, at + 2, across, I, ACT, ROUND)
        yd, gate_d, up_d = _gradients(dy, gate_up, at + 3, across, I, ACT, ROUND)
        dgate, dup = (gate_a, gate_b, gate_c, gate_d), (up_a, up_b, up_c, up_d)
        if PARTS.rows:
            store_quads(dgate, rows, at, column, T, 2 * I, GRADIENTS)
            store_quads(dup, rows, at, I + column, T, 2 * I, GRADIENTS)
        store_columns((ya, yb, yc, yd), y, row, column, T, I, OF_Y)
        store_columns(dgate, columns, row, column, T, 2 * I, GRADIENTS)
        store_columns(dup, columns, row, I + column, T, 2 * I, GRADIENTS)
        largest_gradient = tl.maximum(largest(dgate), largest(dup))
    else:
        store_rows(gate_a, rows, at, column, T, 2 * I, GRADIENTS)
        store_rows(up_a, rows, at, I + column, T, 2 * I, GRADIENTS)
    if PARTS.rows and maxima is not None:
        store_maximum(largest_gradient, maxima)


@triton.jit
def _backward_maximum(dy, gate_up, amax, y_amax, I, ACT: tl.constexpr, PARTS: tl.constexpr):  # noqa: E741
    row, column = part_of(I, PARTS)
    columns = column + tl.arange(0, PARTS.width)
    product, dgate, dup = _gradients(dy, gate_up, rows_of(row, PARTS), columns, I, ACT, False)
    store_maximum(tl.maximum(tl.abs(dgate), tl.abs(dup)), amax)
    store_maximum(tl.abs(product), y_amax)


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
    for parts in out.parts():
        _forward[programs(tokens, width, parts)](
            gate_up, out.operands[0], maxima, tokens, width,
            ACT=act, PARTS=parts, SCALING=out.scaling, num_warps=parts.warps,
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
    operands = (*out.operands, y.operands[1])
    if amax is None and fp8_blockwise_gluon.serves(dy):
        assert maxima is None
        fp8_blockwise_gluon.glu_backward(dy, gate_up, operands, act, out.scaling, y.scaling)
        return out.forms, y.columns
    for parts in out.parts(GIVEN_PARTS, ROWS_BACK, COLUMNS_BACK):
        _backward[programs(tokens, width, parts)](
            dy, gate_up, *operands, maxima, tokens, width,
            ACT=act, PARTS=parts, GRADIENTS=out.scaling, OF_Y=y.scaling, num_warps=parts.warps,
        )  # fmt: skip
    return out.forms, y.columns


def glu_amax(gate_up: Tensor, act: Activation = "silu") -> Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_glu.glu_amax`."""
    tokens, width, maxima = gate_up.shape[0], gate_up.shape[1] // 2, new_maxima(gate_up)
    grid = programs(tokens, width, ROW_PARTS)
    _forward_maximum[grid](gate_up, maxima, width, ACT=act, PARTS=ROW_PARTS, num_warps=ROW_PARTS.warps)
    return maximum_of(maxima)


def glu_backward_amax(dy: Tensor, gate_up: Tensor, act: Activation = "silu") -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_glu.glu_backward_amax`."""
    assert gate_up.shape[1] == 2 * dy.shape[1]
    (tokens, width), maxima = dy.shape, [new_maxima(dy), new_maxima(dy)]
    grid = programs(tokens, width, ROW_PARTS)
    _backward_maximum[grid](dy, gate_up, *maxima, width, ACT=act, PARTS=ROW_PARTS, num_warps=ROW_PARTS.warps)
    return maximum_of(maxima[0]), maximum_of(maxima[1])
