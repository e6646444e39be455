"""Casts to 8 bits in Triton.

A matrix to be transposed is computed as `quads`, four matrices with every fourth row of it: so a thread holds four
values that are adjacent in the transpose, and threads exchange those at once instead of byte by byte.

A program casts a block of a matrix to every requested form. But where tiles of the matrix have scales of their own,
both forms need a whole tile of 128 x 128: bfloat16 matrices are cast in Gluon (fp8_blockwise_gluon.py), others twice,
by rows and by columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.fp8 import fp8_blockwise_gluon, fp8_tensor
from pentad.kernels.fp8.fp8_scaling_triton import Scaling, saturate, scale_of
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, Role

TILE = tl.constexpr(fp8_tensor.TILE)
SQUARE_WARPS = 8
MAXIMA = tl.constexpr(fp8_tensor.MAXIMA)


class Parts(NamedTuple):
    """A program casts a block [4 * quads, width] by `rows` and `columns`; with columns it loads four interleaved
    quads."""

    quads: int
    width: int
    warps: int
    rows: bool = True
    columns: bool = True


GIVEN_PARTS = Parts(16, 64, 2)
ROW_PARTS, COLUMN_PARTS = Parts(8, 128, 2, columns=False), Parts(32, 64, 2, rows=False)  # where tiles have scales


@triton.jit
def part_of(K, PARTS: tl.constexpr):
    """(first row, first column) of what this program casts of a matrix of K columns."""
    program = tl.program_id(0)
    return program // (K // PARTS.width) * (4 * PARTS.quads), program % (K // PARTS.width) * PARTS.width


@triton.jit
def rows_of(row, PARTS: tl.constexpr):
    """The rows of a block, if it is loaded at once, or those of its first quad."""
    STEP: tl.constexpr = 4 if PARTS.columns else 1
    return row + STEP * tl.arange(0, 4 * PARTS.quads // STEP)


@triton.jit
def load(x, rows, columns, K):
    """float32 elements of x [.., K]."""
    return tl.load(x + (rows.to(tl.int64)[:, None] * K + columns[None, :])).to(tl.float32)


@triton.jit
def largest(quads):
    """The absolute maxima of every four rows [QUADS, WIDTH]."""
    a, b, c, d = quads
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def store_rows(x, out, rows, column, T, K, SCALING: tl.constexpr):
    """Casts these rows, from `column` on, of a matrix [T, K] for products over K, to `out`, (values, scales, given
    maxima); 128 columns unless maxima are given."""
    values, scales, amax = out
    if SCALING.given:
        found = tl.load(amax + rows * SCALING.stride)
        scale, inverse = scale_of(found, SCALING.limit, SCALING.power_of_two)
        # One program of a row writes its scale: by a mask, as a branch would cost registers.
        tl.store(scales + rows * SCALING.stride, scale, mask=(column == 0) & (rows >= 0))
        y = saturate(x * inverse[:, None], SCALING.limit)
    else:
        scale, inverse = scale_of(tl.max(tl.abs(x), axis=1), SCALING.limit, SCALING.power_of_two)
        tl.store(scales + column // TILE * T + rows, scale)
        y = x * inverse[:, None]
    columns = column + tl.arange(0, x.shape[1])
    tl.store(values + rows.to(tl.int64)[:, None] * K + columns[None, :], y.to(values.dtype.element_ty))


@triton.jit
def store_quads(quads, out, rows, column, T, K, SCALING: tl.constexpr):
    """Casts the rows of all four quads; `rows` are those of the first."""
    for number in tl.static_range(4):
        store_rows(quads[number], out, rows + number, column, T, K, SCALING)


@triton.jit
def store_columns(quads, out, row, column, T, K, SCALING: tl.constexpr):
    """Casts quads that begin at (row, column) of a matrix [T, K] for products over T, to `out`, (values [K, T], scales,
    given maxima); 128 rows unless maxima are given."""
    values, scales, amax = out
    a, b, c, d = quads
    R: tl.constexpr = a.shape[0]
    C: tl.constexpr = a.shape[1]
    columns = column + tl.arange(0, C)
    if SCALING.given:
        found = tl.load(amax + columns * SCALING.stride)
        scale, inverse = scale_of(found, SCALING.limit, SCALING.power_of_two)
        tl.store(scales + columns * SCALING.stride, scale, mask=(row == 0) & (columns >= 0))
    else:
        scale, inverse = scale_of(tl.max(largest(quads), axis=0), SCALING.limit, SCALING.power_of_two)
        tl.store(scales + row // TILE * K + columns, scale)
    a, b, c, d = a * inverse[None, :], b * inverse[None, :], c * inverse[None, :], d * inverse[None, :]
    if SCALING.given:
        a, b = saturate(a, SCALING.limit), saturate(b, SCALING.limit)
        c, d = saturate(c, SCALING.limit), saturate(d, SCALING.limit)
    dtype = values.dtype.element_ty
    beside = tl.join(tl.join(a.to(dtype), c.to(dtype)), tl.join(b.to(dtype), d.to(dtype)))
    turned = tl.reshape(tl.permute(tl.reshape(beside, (R, C, 4)), (1, 0, 2)), (C, 4 * R))
    rows = row + tl.arange(0, 4 * R)
    tl.store(values + columns.to(tl.int64)[:, None] * T + rows[None, :], turned)


@triton.jit
def store_maximum(maxima, out):
    """Raises one of the places `out` to the largest of a program's `maxima` [.., ..]."""
    tl.atomic_max(out + tl.program_id(0) % MAXIMA, tl.max(tl.max(maxima, axis=1), axis=0), sem="relaxed")


@triton.jit
def _cast(x, rows, columns, maxima, T, K, PARTS: tl.constexpr, SCALING: tl.constexpr):
    row, column = part_of(K, PARTS)
    at, across = rows_of(row, PARTS), column + tl.arange(0, PARTS.width)
    a = load(x, at, across, K)
    if PARTS.columns:
        quads = (a, load(x, at + 1, across, K), load(x, at + 2, across, K), load(x, at + 3, across, K))
        if PARTS.rows:
            store_quads(quads, rows, at, column, T, K, SCALING)
        store_columns(quads, columns, row, column, T, K, SCALING)
        a = largest(quads)
    else:
        store_rows(a, rows, at, column, T, K, SCALING)
    if PARTS.rows and maxima is not None:
        store_maximum(tl.abs(a), maxima)


@triton.jit
def _cast_square(x, rows, columns, T, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALING: tl.constexpr):
    """A program casts a tile that has one scale, in both forms."""
    down, across = tl.program_id(0) // (K // TILE), tl.program_id(0) % (K // TILE)
    row, column = (down * TILE + tl.arange(0, TILE)).to(tl.int64), (across * TILE + tl.arange(0, TILE)).to(tl.int64)
    tile = tl.load(x + row[:, None] * K + column[None, :]).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(tile), axis=1), axis=0), SCALING.limit, SCALING.power_of_two)
    if ROWS:
        values, scales, _ = rows
        tl.store(scales + across * (T // TILE) + down, scale)
        tl.store(values + row[:, None] * K + column[None, :], (tile * inverse).to(values.dtype.element_ty))
    if COLUMNS:
        values, scales, _ = columns
        tl.store(scales + down * (K // TILE) + across, scale)
        # Read again: Triton 3.6 transposes wrong bytes of a float32 tile that is kept for both forms.
        turned = tl.load(x + column[:, None] + row[None, :] * K).to(tl.float32)
        tl.store(values + column[:, None] * T + row[None, :], (turned * inverse).to(values.dtype.element_ty))


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
    """The same maxima for both forms, of which one is requested."""
    return None if amax is None else Amax(amax, amax)


class Out:
    """Memory for the forms of a matrix [T, K], and the arguments of their kernels."""

    def __init__(
        self, shape: tuple[int, int], recipe: Recipe, role: Role, amax: Amax | None, like: Tensor, *forms: bool
    ) -> None:
        assert all(size % fp8_tensor.TILE == 0 for size in shape)
        assert (amax is None) == (recipe.scaling == "block")
        self.recipe, self.role, self.is_given, self.device = recipe, role, amax is not None, like.device
        self.amax = amax or (None, None)
        sides = zip((shape, shape[::-1]), self.amax, forms, strict=True)
        self.rows, self.columns = (self._empty(*side, maxima) if form else None for side, maxima, form in sides)

    def _empty(self, m: int, k: int, amax: Tensor | None) -> Fp8Tensor:
        values = torch.empty(m, k, dtype=self.recipe.dtype(self.role), device=self.device)
        if amax is not None:
            assert m and k and amax.dtype == torch.float32 and amax.is_contiguous()
            return Fp8Tensor(values, torch.empty_like(amax))
        down, across = self.recipe.tile((m, k), self.role)
        return Fp8Tensor(values, torch.empty(k // across, m // down, dtype=torch.float32, device=self.device).t())

    @property
    def operands(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """(values, scales, given maxima) of rows and of columns."""
        (rows, columns), none = self.amax, (None, None)
        return (*(self.rows or none), rows), (*(self.columns or none), columns)

    @property
    def forms(self) -> Fp8Forms:
        return Fp8Forms(self.rows, self.columns)

    @property
    def scaling(self) -> Scaling:
        limit = torch.finfo(self.recipe.dtype(self.role)).max
        return Scaling(self.is_given, int(self.recipe.scaling == "row"), limit, self.recipe.power_of_two)

    def parts(
        self, given: Parts = GIVEN_PARTS, rows: Parts = ROW_PARTS, columns: Parts = COLUMN_PARTS
    ) -> Iterator[Parts]:
        """The parts of each launch for the requested forms."""
        if self.is_given:
            yield given._replace(rows=self.rows is not None, columns=self.columns is not None)
        else:
            yield from [rows] * (self.rows is not None) + [columns] * (self.columns is not None)


def programs(tokens: int, width: int, parts: Parts) -> tuple[int]:
    """The grid that casts a matrix [tokens, width]."""
    return (tokens // (4 * parts.quads) * (width // parts.width),)


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
    if role == "weight" and amax is None:
        assert maxima is None
        _cast_square[t // fp8_tensor.TILE * (k // fp8_tensor.TILE),](
            x, *out.operands, t, k, ROWS=rows, COLUMNS=columns, SCALING=out.scaling, num_warps=SQUARE_WARPS
        )
    elif amax is None and rows and columns and fp8_blockwise_gluon.serves(x):
        assert maxima is None
        fp8_blockwise_gluon.cast(x, out.operands, out.scaling)
    else:
        for parts in out.parts():
            _cast[programs(t, k, parts)](
                x, *out.operands, maxima, t, k, PARTS=parts, SCALING=out.scaling, num_warps=parts.warps
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
