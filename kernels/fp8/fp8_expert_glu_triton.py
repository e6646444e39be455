"""Gated linear units of experts into 8 bits in Triton: a program takes a row; those of unused rows return at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.fp8 import fp8_tensor
from pentad.kernels.fp8.fp8_scaling_triton import scale_of
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Recipe, Role
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate

TILE = tl.constexpr(fp8_tensor.TILE)
LARGEST = 1024  # values of a row at once


@triton.jit
def _store(x, values, scales, columns, inside, BLOCK: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """Casts x [BLOCK], zero where it is not `inside`; `values` and `scales` begin where those of x do."""
    tiles = tl.reshape(x, (BLOCK // TILE, TILE))
    scale, inverse = scale_of(tl.max(tl.abs(tiles), axis=1), LIMIT, POWER)
    tile = tl.arange(0, BLOCK // TILE)
    tl.store(scales + tile, scale, mask=tile * TILE < inside)
    y = tl.reshape(tiles * inverse[:, None], (BLOCK,))
    tl.store(values + columns, y.to(values.dtype.element_ty), mask=columns < inside)


@triton.jit
def _forward(
    gate_up, weights, offsets, values, scales, I, EXPERTS: tl.constexpr,  # noqa: E741
    ACT: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    if row >= tl.load(offsets + EXPERTS - 1):
        return
    columns = tl.arange(0, BLOCK)
    mask = first + columns < I
    gate = tl.load(gate_up + row * (2 * I) + first + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + first + columns, mask=mask, other=0.0).to(tl.float32)
    activated, _, factor, _ = activate(gate, up, ACT)
    y = activated * factor * tl.load(weights + row)
    y = tl.where(mask, y, 0.0)
    _store(y, values + row * I + first, scales + (row * I + first) // TILE, columns, I - first, BLOCK, LIMIT, POWER)


@triton.jit
def _backward(
    dy, gate_up, weights, offsets, dvalues, dscales, values, scales, dweights, I,  # noqa: E741
    EXPERTS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, Y_LIMIT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + EXPERTS - 1):
        return
    weight, columns = tl.load(weights + row), tl.arange(0, BLOCK)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, I, BLOCK):
        mask = first + columns < I
        gate = tl.load(gate_up + row * (2 * I) + first + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * I) + I + first + columns, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + row * I + first + columns, mask=mask, other=0.0).to(tl.float32)
        activated, slope, factor, factor_slope = activate(gate, up, ACT)
        dweight += d * activated * factor
        d *= weight
        y = tl.where(mask, activated * factor * weight, 0.0)
        at, tile = row * (2 * I) + first, (row * (2 * I) + first) // TILE
        _store(d * factor * slope, dvalues + at, dscales + tile, columns, I - first, BLOCK, LIMIT, POWER)
        at += I
        tile += I // TILE
        _store(d * activated * factor_slope, dvalues + at, dscales + tile, columns, I - first, BLOCK, LIMIT, POWER)
        at, tile = row * I + first, (row * I + first) // TILE
        _store(y, values + at, scales + tile, columns, I - first, BLOCK, Y_LIMIT, POWER)
    tl.store(dweights + row, tl.sum(dweight, 0))


def _empty(rows: int, width: int, recipe: Recipe, role: Role, like: Tensor) -> Fp8Tensor:
    values = torch.empty(rows, width, dtype=recipe.dtype(role), device=like.device)
    return Fp8Tensor(values, torch.empty(rows, width // TILE.value, dtype=torch.float32, device=like.device))


def _limit(recipe: Recipe, role: Role) -> float:
    return torch.finfo(recipe.dtype(role)).max


def fp8_weighted_glu(
    gate_up: Tensor, weights: Tensor, offsets: Tensor, recipe: Recipe, act: Activation = "silu"
) -> Fp8Tensor:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_expert_glu.fp8_weighted_glu`."""
    assert recipe.scaling == "block" and gate_up.shape[1] % (2 * TILE.value) == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y, block = _empty(rows, width, recipe, "activation", gate_up), min(LARGEST, triton.next_power_of_2(width))
    limit = _limit(recipe, "activation")
    if rows:
        _forward[(rows, ceil_div(width, block))](
            gate_up, weights, offsets, *y, width, offsets.shape[0],
            ACT=act, BLOCK=block, LIMIT=limit, POWER=recipe.power_of_two, num_warps=2,
        )  # fmt: skip
    return y


def fp8_weighted_glu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor, recipe: Recipe, act: Activation = "silu"
) -> tuple[Fp8Tensor, Fp8Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.fp8.fp8_expert_glu.fp8_weighted_glu_backward`."""
    assert recipe.scaling == "block"
    (rows, width), block = dy.shape, min(LARGEST, triton.next_power_of_2(dy.shape[1]))
    assert gate_up.shape == (rows, 2 * width) and width % TILE.value == 0
    dgate_up, y = _empty(rows, 2 * width, recipe, "gradient", dy), _empty(rows, width, recipe, "activation", dy)
    dweights = torch.empty_like(weights)
    limits = {"LIMIT": _limit(recipe, "gradient"), "Y_LIMIT": _limit(recipe, "activation")}
    if rows:
        _backward[(rows,)](
            dy, gate_up, weights, offsets, *dgate_up, *y, dweights, width, offsets.shape[0],
            ACT=act, BLOCK=block, **limits, POWER=recipe.power_of_two, num_warps=4,
        )  # fmt: skip
    return dgate_up, y, dweights
