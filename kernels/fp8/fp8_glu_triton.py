"""Gated linear units into 8 bits in Triton: a program takes a tile of 128 x 128 of the gate, and the same of up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_cast_triton import WARPS, Out, store_forms, store_rows, tiles
from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor, Recipe
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate

TILE = tl.constexpr(fp8_tensor.TILE)
BACKWARD_WARPS = 16  # three tiles in registers


@triton.jit
def _forward(
    gate_up, values, scales, amax, T, I, ACT: tl.constexpr,  # noqa: E741
    GIVEN: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    across = I // TILE
    first_row, first_column = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    row, column = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
    gate = tl.load(gate_up + offsets).to(tl.float32)
    up = tl.load(gate_up + I + offsets).to(tl.float32)
    activated, _, factor, _ = activate(gate, up, ACT)
    store_rows(activated * factor, values, scales, first_row, first_column, T, I, amax, GIVEN, LIMIT, POWER, False)


@triton.jit
def _backward(
    dy, gate_up, rows, row_scales, columns, column_scales, amax, y, y_scales, y_amax, T, I,  # noqa: E741
    ACT: tl.constexpr, Y_LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
    SQUARE: tl.constexpr,
):  # fmt: skip
    across = I // TILE
    first_row, first_column = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    row, column = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
    gate = tl.load(gate_up + offsets).to(tl.float32)
    up = tl.load(gate_up + I + offsets).to(tl.float32)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    store_rows(
        tl.trans(activated * factor), y, y_scales, first_column, first_row, I, T, y_amax, GIVEN, Y_LIMIT, POWER, False
    )
    d = tl.load(dy + row.to(tl.int64)[:, None] * I + column[None, :]).to(tl.float32)
    store_forms(
        d * factor * slope, rows, row_scales, columns, column_scales, first_row, first_column, T, 2 * I, amax,
        ROWS, COLUMNS, GIVEN, LIMIT, POWER, SQUARE,
    )  # fmt: skip
    store_forms(
        d * activated * factor_slope, rows, row_scales, columns, column_scales, first_row, I + first_column, T, 2 * I,
        amax, ROWS, COLUMNS, GIVEN, LIMIT, POWER, SQUARE,
    )  # fmt: skip


def fp8_glu(gate_up: Tensor, recipe: Recipe, act: Activation = "silu", amax: Tensor | None = None) -> Fp8Tensor:
    """Launches the forward kernel; see `pentad.kernels.fp8.fp8_glu.fp8_glu`."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = Out((tokens, width), recipe, "activation", amax, gate_up, True, False)
    assert out.rows is not None
    constants = {name: out.constants[name] for name in ("GIVEN", "LIMIT", "POWER")}
    _forward[tiles(tokens, width)](gate_up, *out.rows, amax, tokens, width, ACT=act, **constants, num_warps=WARPS)
    return out.rows


def fp8_glu_backward(
    dy: Tensor,
    gate_up: Tensor,
    recipe: Recipe,
    act: Activation = "silu",
    amax: tuple[Tensor, Tensor] | None = None,
) -> tuple[Fp8Forms, Fp8Tensor]:
    """Launches the backward kernel; see `pentad.kernels.fp8.fp8_glu.fp8_glu_backward`."""
    assert gate_up.is_contiguous() and dy.is_contiguous() and gate_up.shape[1] == 2 * dy.shape[1]
    (tokens, width), (of_gradient, of_y) = dy.shape, amax or (None, None)
    out = Out((tokens, 2 * width), recipe, "gradient", of_gradient, dy, True, True)
    y = Out((tokens, width), recipe, "activation", of_y, dy, False, True)
    assert y.columns is not None
    _backward[tiles(tokens, width)](
        dy, gate_up, *out.pointers, *y.columns, of_y, tokens, width,
        ACT=act, Y_LIMIT=y.constants["LIMIT"], **out.constants, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return out.forms, y.columns
