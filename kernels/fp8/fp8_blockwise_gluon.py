"""Casts bfloat16 matrices to both forms, with scales of 1 x 128 tiles, in Gluon: a program reads 128 x 128 once.

It casts rows as they come and stages them in shared memory, from which it reads columns. They are staged in another
order: `ldmatrix` gives a thread two of every eight rows, so neighbouring rows of the matrix are staged two by two,
eight apart, and each thread gets 32 consecutive values of a column.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_scaling_triton import Scaling, scale_of
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate

TILE = gl.constexpr(fp8_tensor.TILE)
STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
CAST, GLU = (64, 4), (32, 8)  # rows that a program loads at once, and its warps


def serves(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


@triton.constexpr_function
def row_layout(warps: int) -> gl.BlockedLayout:
    """A thread has 16 neighbours of a row."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@triton.constexpr_function
def column_layout(warps: int) -> gl.DistributedLinearLayout:
    """Of [128, 8 * warps] as `ldmatrix` transposes it: a thread has two of every eight rows of a column."""
    of_warps = [[0, 8 << bit] for bit in range(warps.bit_length() - 1)]
    of_thread, of_lane = [[1, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(of_thread, of_lane, of_warps, [], [128, 8 * warps])


@gluon.jit
def tile_of(K):
    """(first row, first column) of this program's tile of a matrix of K columns."""
    return gl.program_id(0) // (K // TILE) * TILE, gl.program_id(0) % (K // TILE) * TILE


@gluon.jit
def staged_rows(row, place, COUNT: gl.constexpr):
    """The rows that are staged from `place` on, of a tile whose first row is `row`."""
    places = place + gl.arange(0, COUNT, gl.SliceLayout(1, row_layout(gl.num_warps())))
    return row + (places >> 1 & 3) * 32 + (places >> 3) * 2 + (places & 1)


@gluon.jit
def load_rows(x, rows, column, K):
    columns = column + gl.arange(0, TILE, gl.SliceLayout(0, row_layout(gl.num_warps())))
    return gl.load(x + (rows.to(gl.int64)[:, None] * K + columns[None, :]))


@gluon.jit
def store_rows(x, out, rows, column, T, K, SCALING: gl.constexpr):
    """Casts these rows [.., 128], from `column` on, of a matrix [T, K] for products over K, to `out`, (values,
    scales)."""
    values, scales, _ = out
    scale, inverse = scale_of(gl.max(gl.abs(x), axis=1), SCALING.limit, SCALING.power_of_two)
    gl.store(scales + column // TILE * T + rows, scale)
    columns = column + gl.arange(0, TILE, gl.SliceLayout(0, row_layout(gl.num_warps())))
    y = (x * inverse[:, None]).to(values.dtype.element_ty)
    gl.store(values + (rows.to(gl.int64)[:, None] * K + columns[None, :]), y)


@gluon.jit
def store_columns(staged, out, row, column, T, K, SCALING: gl.constexpr):
    """Casts the tile that is staged, which begins at (row, column) of a matrix [T, K], for products over T, to `out`,
    (values [K, T], scales)."""
    values, scales, _ = out
    layout: gl.constexpr = column_layout(gl.num_warps())
    AT_ONCE: gl.constexpr = 8 * gl.num_warps()
    for part in gl.static_range(TILE // AT_ONCE):
        first = column + part * AT_ONCE
        x = staged.slice(part * AT_ONCE, AT_ONCE, dim=1).load(layout).to(gl.float32)
        scale, inverse = scale_of(gl.max(gl.abs(x), axis=0), SCALING.limit, SCALING.power_of_two)
        gl.store(scales + row // TILE * K + first + gl.arange(0, AT_ONCE, gl.SliceLayout(0, layout)), scale)
        y = (x * inverse[None, :]).to(values.dtype.element_ty)
        _store(y.reshape([16, 4, 2, AT_ONCE]).permute([3, 1, 0, 2]).reshape([AT_ONCE, TILE]), values, first, row, T)


@gluon.jit
def _store(block, out, row, column, K):
    layout: gl.constexpr = block.type.layout
    rows = row + gl.arange(0, block.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, block.shape[1], gl.SliceLayout(0, layout))
    gl.store(out + (rows.to(gl.int64)[:, None] * K + columns[None, :]), block)


@gluon.jit
def _cast(x, rows, columns, T, K, COUNT: gl.constexpr, SCALING: gl.constexpr):
    row, column = tile_of(K)
    staged = gl.allocate_shared_memory(x.dtype.element_ty, [TILE, TILE], STAGED)
    ahead = load_rows(x, staged_rows(row, 0, COUNT), column, K)
    for place in gl.static_range(0, TILE, COUNT):
        block = ahead
        if place + COUNT < TILE:
            ahead = load_rows(x, staged_rows(row, place + COUNT, COUNT), column, K)
        staged.slice(place, COUNT).store(block)
        store_rows(block.to(gl.float32), rows, staged_rows(row, place, COUNT), column, T, K, SCALING)
    store_columns(staged, columns, row, column, T, K, SCALING)


@gluon.jit
def _rounded(x):
    """Rounded to bfloat16, two at once: the compiler would round those that are read again in float32 one at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _load(dy, gate_up, rows, column, I):  # noqa: E741
    gate, up = load_rows(gate_up, rows, column, 2 * I), load_rows(gate_up, rows, I + column, 2 * I)
    return load_rows(dy, rows, column, I), gate, up


@gluon.jit
def _gradients(dy, gate, up, ACT: gl.constexpr):
    """(y, dgate, dup)"""
    d, gate, up = dy.to(gl.float32), gate.to(gl.float32), up.to(gl.float32)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    return _rounded(activated * factor), _rounded(d * factor * slope), _rounded(d * activated * factor_slope)


@gluon.jit
def _glu_backward(
    dy, gate_up, rows, columns, y, T, I,  # noqa: E741
    COUNT: gl.constexpr, ACT: gl.constexpr, GRADIENTS: gl.constexpr, OF_Y: gl.constexpr,
):  # fmt: skip
    row, column = tile_of(I)
    dtype: gl.constexpr = dy.dtype.element_ty
    ys = gl.allocate_shared_memory(dtype, [TILE, TILE], STAGED)
    gates = gl.allocate_shared_memory(dtype, [TILE, TILE], STAGED)
    ups = gl.allocate_shared_memory(dtype, [TILE, TILE], STAGED)
    ahead = _load(dy, gate_up, staged_rows(row, 0, COUNT), column, I)
    for place in gl.static_range(0, TILE, COUNT):
        now = ahead
        if place + COUNT < TILE:
            ahead = _load(dy, gate_up, staged_rows(row, place + COUNT, COUNT), column, I)
        product, dgate, dup = _gradients(now[0], now[1], now[2], ACT)
        ys.slice(place, COUNT).store(product)
        gates.slice(place, COUNT).store(dgate)
        ups.slice(place, COUNT).store(dup)
        at = staged_rows(row, place, COUNT)
        store_rows(dgate.to(gl.float32), rows, at, column, T, 2 * I, GRADIENTS)
        store_rows(dup.to(gl.float32), rows, at, I + column, T, 2 * I, GRADIENTS)
    store_columns(ys, y, row, column, T, I, OF_Y)
    store_columns(gates, columns, row, column, T, 2 * I, GRADIENTS)
    store_columns(ups, columns, row, I + column, T, 2 * I, GRADIENTS)


def _grid(tokens: int, width: int) -> tuple[int]:
    return (tokens // fp8_tensor.TILE * (width // fp8_tensor.TILE),)


Operands = tuple[tuple[Tensor | None, ...], ...]


def cast(x: Tensor, operands: Operands, scaling: Scaling) -> None:
    """Casts x to the `operands` of both forms."""
    (t, k), (count, warps) = x.shape, CAST
    _cast[_grid(t, k)](x, *operands, t, k, COUNT=count, SCALING=scaling, num_warps=warps)


def glu_backward(
    dy: Tensor, gate_up: Tensor, operands: Operands, act: Activation, gradients: Scaling, y: Scaling
) -> None:
    """Casts the gradients of `gate_up` in both forms, and y by columns, to `operands`."""
    (tokens, width), (count, warps) = dy.shape, GLU
    _glu_backward[_grid(tokens, width)](
        dy, gate_up, *operands, tokens, width, COUNT=count, ACT=act, GRADIENTS=gradients, OF_Y=y, num_warps=warps
    )
