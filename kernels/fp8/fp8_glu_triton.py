"""Gated linear units into 8 bits in Triton: a program takes a block of the gate and the matching block of up."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import (
    ROW_PARTS,
    Out,
    Parts,
    Scaling,
    cast_parts,
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
GIVEN_PARTS, SPLIT_PARTS = Parts(8, 64, 2), Parts(4, 16, 4, split=True)


class Backward(NamedTuple):
    """Settings of the backward kernel."""

    act: Activation
    gradients: Scaling
    y: Scaling


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
def _gradients(dy, gate_up, row, column, I, ACT: tl.constexpr):  # noqa: E741
    """(y, dgate, dup)"""
    gate, up = load(gate_up, row, column, 2 * I), load(gate_up + I, row, column, 2 * I)
    d = load(dy, row, column, I)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    return activated * factor, d * factor * slope, d * activated * factor_slope


@triton.jit
def _cast_gradients(operands, row, column, PARTS: tl.constexpr, SETTINGS: tl.constexpr):
    dy, gate_up, rows, columns, y, maxima, T, I = operands  # noqa: E741
    act: tl.constexpr = SETTINGS.act
    scaling: tl.constexpr = SETTINGS.gradients
    of_y: tl.constexpr = SETTINGS.y
    at, across = rows_of(row, PARTS), column + tl.arange(0, PARTS.width)
    ya, gate_a, up_a = _gradients(dy, gate_up, at, across, I, act)
    largest_gradient = tl.maximum(tl.abs(gate_a), tl.abs(up_a))
    if PARTS.columns:
        yb, gate_b, up_b = _gradients(dy, gate_up, at + 1, across, I, act)
        yc, gate_c, up_c = _gradients(dy, gate_up, at + 2, across, I, act)
        yd, gate_d, up_d = _gradients(dy, gate_up, at + 3, across, I, act)
        dgate, dup = (gate_a, gate_b, gate_c, gate_d), (up_a, up_b, up_c, up_d)
        if PARTS.rows:
            store_quads(dgate, rows, at, column, T, 2 * I, scaling)
            store_quads(dup, rows, at, I + column, T, 2 * I, scaling)
        store_columns((ya, yb, yc, yd), y, row, column, T, I, of_y)
        store_columns(dgate, columns, row, column, T, 2 * I, scaling)
        store_columns(dup, columns, row, I + column, T, 2 * I, scaling)
        largest_gradient = tl.maximum(largest(dgate), largest(dup))
    else:
        store_rows(gate_a, rows, at, column, T, 2 * I, scaling)
        store_rows(up_a, rows, at, I + column, T, 2 * I, scaling)
    if PARTS.rows and maxima is not None:
        store_maximum(largest_gradient, maxima)


@triton.jit
def _backward(
    dy, gate_up, rows, columns, y, maxima, T, I,  # noqa: E741
    PARTS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    cast_parts(_cast_gradients, (dy, gate_up, rows, columns, y, maxima, T, I), I, PARTS, SETTINGS)


@triton.jit
def _backward_maximum(dy, gate_up, amax, y_amax, I, ACT: tl.constexpr, PARTS: tl.constexpr):  # noqa: E741
    row, column = part_of(I, PARTS)
    columns = column + tl.arange(0, PARTS.width)
    product, dgate, dup = _gradients(dy, gate_up, rows_of(row, PARTS), columns, I, ACT)
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
    parts = out.parts()
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
    parts = out.parts(GIVEN_PARTS, SPLIT_PARTS)
    _backward[programs(tokens, width, parts)](
        dy, gate_up, *out.operands, y.operands[1], maxima, tokens, width,
        PARTS=parts, SETTINGS=Backward(act, out.scaling, y.scaling), num_warps=parts.warps,
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
