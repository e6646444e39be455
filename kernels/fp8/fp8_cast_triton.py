"""Casts to 8 bits in Triton: a program takes a tile of 128 x 128, which has whole scales in both forms.

`store_forms` is shared by the kernels that compute what they cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor, Recipe, Role

TILE = tl.constexpr(fp8_tensor.TILE)
TINY = tl.constexpr(fp8_tensor.TINY)
WARPS = 8


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """(the scale, by what values are multiplied to be cast)"""
    scale = tl.div_rn(tl.maximum(amax, TINY), LIMIT)
    if POWER:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_rows(
    x, values, scales, first_row, first_column, T, K, amax, GIVEN: tl.constexpr,
    LIMIT: tl.constexpr, POWER: tl.constexpr,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Casts a tile x of a matrix [T, K] for products over K; SQUARE: with one scale for all of it."""
    row, column = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    if GIVEN:
        _, inverse = scale_of(tl.load(amax), LIMIT, POWER)
        y = saturate(x * inverse, LIMIT)
    elif SQUARE:
        scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), axis=1), axis=0), LIMIT, POWER)
        tl.store(scales + first_column // TILE * (T // TILE) + first_row // TILE, scale)
        y = x * inverse
    else:
        scale, inverse = scale_of(tl.max(tl.abs(x), axis=1), LIMIT, POWER)
        tl.store(scales + first_column // TILE * T + row, scale)
        y = x * inverse[:, None]
    y = y.to(values.dtype.element_ty)
    tl.store(values + row.to(tl.int64)[:, None] * K + column[None, :], y)


@triton.jit
def store_forms(
    x, rows, row_scales, columns, column_scales, first_row, first_column, T, K, amax,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Casts a tile x of a matrix [T, K] in the forms that are asked for."""
    if ROWS:
        store_rows(x, rows, row_scales, first_row, first_column, T, K, amax, GIVEN, LIMIT, POWER, SQUARE)
    if COLUMNS:
        turned = tl.trans(x)
        store_rows(turned, columns, column_scales, first_column, first_row, K, T, amax, GIVEN, LIMIT, POWER, SQUARE)


@triton.jit
def _cast(
    x, rows, row_scales, columns, column_scales, amax, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
    SQUARE: tl.constexpr,
):  # fmt: skip
    across = K // TILE
    first_row, first_column = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    row, column = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    tile = tl.load(x + row.to(tl.int64)[:, None] * K + column[None, :]).to(tl.float32)
    store_forms(
        tile, rows, row_scales, columns, column_scales, first_row, first_column, T, K, amax,
        ROWS, COLUMNS, GIVEN, LIMIT, POWER, SQUARE,
    )  # fmt: skip


class Out:
    """Memory for the forms of a matrix [T, K], and what their kernels are told."""

    def __init__(
        self, shape: tuple[int, int], recipe: Recipe, role: Role, amax: Tensor | None, like: Tensor, *forms: bool
    ) -> None:
        assert all(size % fp8_tensor.TILE == 0 for size in shape)
        assert (amax is None) == (recipe.scaling == "block")
        assert recipe.scaling != "row", "rows are cast by the reference"
        self.recipe, self.role, self.amax, self.device = recipe, role, amax, like.device
        sides = shape, shape[::-1]
        self.rows, self.columns = (
            self._empty(*side) if form else None for side, form in zip(sides, forms, strict=True)
        )
        if amax is not None:
            scales = fp8_tensor.scale_of(amax, recipe.dtype(role), power_of_two=recipe.power_of_two)
            self.rows, self.columns = (each and each._replace(scales=scales) for each in (self.rows, self.columns))

    def _empty(self, m: int, k: int) -> Fp8Tensor:
        dtype = self.recipe.dtype(self.role)
        values = torch.empty(m, k, dtype=dtype, device=self.device)
        if self.amax is not None:
            return Fp8Tensor(values, self.amax)
        down, across = self.recipe.tile((m, k), self.role)
        return Fp8Tensor(values, torch.empty(k // across, m // down, dtype=torch.float32, device=self.device).t())

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """rows, row_scales, columns, column_scales, amax"""
        return (*(self.rows or (None, None)), *(self.columns or (None, None)), self.amax)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "ROWS": self.rows is not None,
            "COLUMNS": self.columns is not None,
            "GIVEN": self.amax is not None,
            "LIMIT": torch.finfo(self.recipe.dtype(self.role)).max,
            "POWER": self.recipe.power_of_two,
            "SQUARE": self.role == "weight",
        }

    @property
    def forms(self) -> Fp8Forms:
        return Fp8Forms(self.rows, self.columns)


def tiles(t: int, k: int) -> tuple[int]:
    return ((t // fp8_tensor.TILE) * (k // fp8_tensor.TILE),)


def fp8_cast(
    x: Tensor, recipe: Recipe, role: Role, amax: Tensor | None = None, *, rows: bool = True, columns: bool = True
) -> Fp8Forms:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_cast.fp8_cast`."""
    assert x.is_contiguous()
    t, k = x.shape
    out = Out((t, k), recipe, role, amax, x, rows, columns)
    _cast[tiles(t, k)](x, *out.pointers, t, k, **out.constants, num_warps=WARPS)
    return out.forms
