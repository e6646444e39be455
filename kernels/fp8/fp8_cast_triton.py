"""Casts to 8 bits in Triton.

A program casts a part of a tile of 128 x 128 in one form: CHUNK whole rows of it, or CHUNK whole columns, which it
transposes. So it holds few numbers, an SM runs many programs, and those of a tile follow each other: its second form is
made of what the cache still has. `part_of` says what a program has to do, `store_rows` and `store_columns` are shared
by the kernels that compute what they cast.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, Role

TILE = tl.constexpr(fp8_tensor.TILE)
TINY = tl.constexpr(fp8_tensor.TINY)
CHUNK, WARPS = 32, 2  # rows or columns, and warps, of a program
SQUARE_WARPS = 8
MAXIMA = tl.constexpr(fp8_tensor.MAXIMA)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """(the scale, by what values are multiplied to be cast)"""
    scale = tl.maximum(amax, TINY) * (1.0 / LIMIT)
    if POWER:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def part_of(program, K, FORMS: tl.constexpr, CHUNK: tl.constexpr):
    """(first row, first column, chunk) of a program in a matrix of K columns: the tile that it works on, and where its
    part of this begins; from TILE on parts are of the second form."""
    parts = TILE // CHUNK * FORMS
    tile, part = program // parts, program % parts
    return tile // (K // TILE) * TILE, tile % (K // TILE) * TILE, part * CHUNK


@triton.jit
def store_rows(
    x, values, scales, first, row, column, T, K, GIVEN: tl.constexpr, STRIDE: tl.constexpr,
    LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Casts the chunk x of a matrix [T, K], 128 columns wide from `first`, for products over K."""
    if GIVEN:
        y = saturate(x * tl.div_rn(1.0, tl.load(scales + row * STRIDE))[:, None], LIMIT)
    else:
        scale, inverse = scale_of(tl.max(tl.abs(x), axis=1), LIMIT, POWER)
        tl.store(scales + first // TILE * T + row, scale)
        y = x * inverse[:, None]
    tl.store(values + row.to(tl.int64)[:, None] * K + column[None, :], y.to(values.dtype.element_ty))


@triton.jit
def store_columns(
    x, values, scales, first, row, column, T, K, GIVEN: tl.constexpr, STRIDE: tl.constexpr,
    LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Casts the chunk x of a matrix [T, K], 128 rows high from `first`, for products over T, to values [K, T]."""
    if GIVEN:
        y = saturate(x * tl.div_rn(1.0, tl.load(scales + column * STRIDE))[None, :], LIMIT)
    else:
        scale, inverse = scale_of(tl.max(tl.abs(x), axis=0), LIMIT, POWER)
        tl.store(scales + first // TILE * K + column, scale)
        y = x * inverse[None, :]
    turned = tl.trans(y.to(values.dtype.element_ty))
    tl.store(values + column.to(tl.int64)[:, None] * T + row[None, :], turned)


@triton.jit
def store_maximum(maxima, out):
    """Raises one of the places `out` to the largest of a program's `maxima`."""
    tl.atomic_max(out + tl.program_id(0) % MAXIMA, tl.max(maxima, axis=0), sem="relaxed")


@triton.jit
def _cast(
    x, rows, row_scales, columns, column_scales, maxima, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GIVEN: tl.constexpr, STRIDE: tl.constexpr,
    LIMIT: tl.constexpr, POWER: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first_row, first_column, chunk = part_of(tl.program_id(0), K, ROWS + COLUMNS, CHUNK)
    if ROWS:  # noqa: SIM102 - decides what is compiled
        if chunk < TILE:
            row, column = first_row + chunk + tl.arange(0, CHUNK), first_column + tl.arange(0, TILE)
            part = tl.load(x + row.to(tl.int64)[:, None] * K + column[None, :]).to(tl.float32)
            store_rows(part, rows, row_scales, first_column, row, column, T, K, GIVEN, STRIDE, LIMIT, POWER)
            if RECORD:
                store_maximum(tl.max(tl.abs(part), axis=1), maxima)
    if COLUMNS:  # noqa: SIM102 - decides what is compiled
        if chunk >= TILE * ROWS:
            row, column = first_row + tl.arange(0, TILE), first_column + chunk % TILE + tl.arange(0, CHUNK)
            part = tl.load(x + row.to(tl.int64)[:, None] * K + column[None, :]).to(tl.float32)
            store_columns(part, columns, column_scales, first_row, row, column, T, K, GIVEN, STRIDE, LIMIT, POWER)


@triton.jit
def _cast_square(
    x, rows, row_scales, columns, column_scales, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """A program casts a tile that has one scale, in both forms."""
    down, across = tl.program_id(0) // (K // TILE), tl.program_id(0) % (K // TILE)
    row, column = (down * TILE + tl.arange(0, TILE)).to(tl.int64), (across * TILE + tl.arange(0, TILE)).to(tl.int64)
    tile = tl.load(x + row[:, None] * K + column[None, :]).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(tile), axis=1), axis=0), LIMIT, POWER)
    if ROWS:
        tl.store(row_scales + across * (T // TILE) + down, scale)
        tl.store(rows + row[:, None] * K + column[None, :], (tile * inverse).to(rows.dtype.element_ty))
    if COLUMNS:
        tl.store(column_scales + down * (K // TILE) + across, scale)
        # Read again: of a float32 tile kept for both forms, Triton 3.6 transposes wrong bytes.
        turned = tl.load(x + column[:, None] + row[None, :] * K).to(tl.float32)
        tl.store(columns + column[:, None] * T + row[None, :], (turned * inverse).to(columns.dtype.element_ty))


@triton.jit
def _transpose(x, out, T, K):
    """A program transposes a tile of x [T, K]."""
    down, across = tl.program_id(0) // (K // TILE), tl.program_id(0) % (K // TILE)
    row, column = (down * TILE + tl.arange(0, TILE)).to(tl.int64), (across * TILE + tl.arange(0, TILE)).to(tl.int64)
    tile = tl.load(x + row[:, None] * K + column[None, :])
    tl.store(out + column[:, None] * T + row[None, :], tl.trans(tile))


def new_maxima(like: Tensor) -> Tensor:
    return torch.zeros(MAXIMA.value, dtype=torch.float32, device=like.device)


def maximum_of(maxima: Tensor) -> Tensor:
    """[1, 1]"""
    return maxima.amax().view(1, 1)


def twice(amax: Tensor | None) -> Amax | None:
    """For the one form that is asked for."""
    return None if amax is None else Amax(amax, amax)


class Out:
    """Memory for the forms of a matrix [T, K], and the arguments of their kernels."""

    def __init__(
        self, shape: tuple[int, int], recipe: Recipe, role: Role, amax: Amax | None, like: Tensor, *forms: bool
    ) -> None:
        assert all(size % fp8_tensor.TILE == 0 for size in shape)
        assert (amax is None) == (recipe.scaling == "block")
        self.recipe, self.role, self.is_given, self.device = recipe, role, amax is not None, like.device
        sides = zip((shape, shape[::-1]), amax or (None, None), forms, strict=True)
        self.rows, self.columns = (self._empty(*side, maxima) if form else None for side, maxima, form in sides)

    def _empty(self, m: int, k: int, amax: Tensor | None) -> Fp8Tensor:
        dtype = self.recipe.dtype(self.role)
        values = torch.empty(m, k, dtype=dtype, device=self.device)
        if amax is not None:
            return Fp8Tensor(values, fp8_tensor.scale_of(amax, dtype, power_of_two=self.recipe.power_of_two))
        down, across = self.recipe.tile((m, k), self.role)
        return Fp8Tensor(values, torch.empty(k // across, m // down, dtype=torch.float32, device=self.device).t())

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """rows, row_scales, columns, column_scales"""
        return (*(self.rows or (None, None)), *(self.columns or (None, None)))

    @property
    def common(self) -> dict[str, Any]:
        """Constants of all kernels."""
        limit = torch.finfo(self.recipe.dtype(self.role)).max
        stride = int(self.recipe.scaling == "row")
        return {"GIVEN": self.is_given, "STRIDE": stride, "LIMIT": limit, "POWER": self.recipe.power_of_two}

    @property
    def chosen(self) -> dict[str, Any]:
        """Constants of kernels that make the forms asked for."""
        return {"ROWS": self.rows is not None, "COLUMNS": self.columns is not None}

    @property
    def forms(self) -> Fp8Forms:
        return Fp8Forms(self.rows, self.columns)


def parts(t: int, k: int, forms: int = 1, chunk: int = CHUNK) -> tuple[int]:
    """Programs for this many forms of a matrix [t, k]."""
    return ((t // fp8_tensor.TILE) * (k // chunk) * forms,)


def fp8_cast(
    x: Tensor,
    recipe: Recipe,
    role: Role,
    amax: Amax | None = None,
    *,
    rows: bool = True,
    columns: bool = True,
    maxima: Tensor | None = None,
) -> Fp8Forms:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_cast.fp8_cast`."""
    assert x.is_contiguous() and (rows or maxima is None)
    t, k = x.shape
    out = Out((t, k), recipe, role, amax, x, rows, columns)
    constants = out.common | out.chosen
    if role == "weight" and amax is None:
        assert maxima is None
        del constants["GIVEN"], constants["STRIDE"]
        grid = (t // fp8_tensor.TILE * (k // fp8_tensor.TILE),)
        _cast_square[grid](x, *out.pointers, t, k, **constants, num_warps=SQUARE_WARPS)
    else:
        _cast[parts(t, k, rows + columns)](
            x, *out.pointers, maxima, t, k, **constants, RECORD=maxima is not None, CHUNK=CHUNK, num_warps=WARPS
        )
    return out.forms


def fp8_transpose(values: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_cast.fp8_transpose`."""
    assert all(size % fp8_tensor.TILE == 0 for size in values.shape)
    t, k = values.shape
    out = torch.empty(k, t, dtype=values.dtype, device=values.device)
    tiles = t // fp8_tensor.TILE * (k // fp8_tensor.TILE)
    _transpose[tiles,](values.view(torch.uint8), out.view(torch.uint8), t, k, num_warps=SQUARE_WARPS)
    return out
