"""Tensors of 8-bit floating-point numbers with scales, and the recipes that say which values share a scale.

A tile of the tensor has one scale: the numbers that it stands for are its values times the scale. Recipes:

- block: DeepSeek-V3's (arXiv 2412.19437, section 3.3): tiles of 1 x 128 in activations and gradients, 128 x 128 in
  weights;
- row: a scale for each row of a left operand, and for each column of a right one;
- tensor: one scale for the whole tensor.

Every product sums over the last dimension of both operands. So a matrix that is also multiplied along its other
dimension is needed in a second form, transposed, with scales of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype

Scaling = Literal["tensor", "row", "block"]
Role = Literal["activation", "gradient", "weight"]
TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAXIMA = 64  # places for a maximum that many programs raise, which would wait for each other at a single one
TINY = 2.0**-60  # the least absolute maximum that a scale is made for: smaller tiles become zeros, and 0 has a scale


class Recipe(NamedTuple):
    """How activations, gradients and weights are cast; `gradients` is the dtype of the gradients of activations."""

    scaling: Scaling
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = False  # scales are rounded up to powers of two

    def dtype(self, role: Role) -> torch.dtype:
        return E5M2 if role == "gradient" and self.gradients == "e5m2" else E4M3

    def tile(self, shape: tuple[int, int], role: Role) -> tuple[int, int]:
        """Rows and columns that share a scale in a matrix [M, K] of products over K."""
        if self.scaling == "tensor":
            return shape
        if self.scaling == "row":
            return 1, shape[1]
        return (TILE, TILE) if role == "weight" else (1, TILE)


class Fp8Tensor(NamedTuple):
    """A matrix [M, K] of `values` times `scales`, one float32 for each tile: [M / rows, K / columns] for tiles of rows
    x columns.

    The scales of 1 x 128 tiles are stored column by column, as cuBLAS wants them.
    """

    values: Tensor
    scales: Tensor

    def part(self, rows: slice) -> Fp8Tensor:
        """Some of the rows, if tiles have one row or the tensor has one scale."""
        scales = self.scales
        if scales.numel() > 1:
            scales = scales.t()[:, rows].contiguous().t()
        return Fp8Tensor(self.values[rows], scales)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        sizes = zip(self.values.shape, self.scales.shape, strict=True)
        rows, columns = (size // max(1, count) for size, count in sizes)  # there may be no row
        scales = self.scales.to(dtype).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return self.values.to(dtype) * scales


class Fp8Forms(NamedTuple):
    """A matrix [T, K] as operands: `rows` [T, K] of products over K, `columns` [K, T] of products over T."""

    rows: Fp8Tensor | None
    columns: Fp8Tensor | None


class Amax(NamedTuple):
    """Absolute maxima of a matrix [T, K] to scale its forms by: of each row [T, 1] and each column [K, 1], or of all of
    it [1, 1], twice. Those of a form that is not cast may be empty."""

    rows: Tensor
    columns: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """The scales, float32, that map absolute maxima `amax` to the largest number of an 8-bit dtype."""
    scale = amax.float().clamp(min=TINY) * (1 / torch.finfo(dtype).max)
    if power_of_two:
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def quantize(x: Tensor, recipe: Recipe, role: Role, amax: Tensor | None = None) -> Fp8Tensor:
    """Casts a matrix x [M, K] for products over K: to the nearest number, ties to even. bfloat16 is scaled in float32.

    `amax`, of the shape of the scales, are the maxima to scale by instead of those of x; what exceeds them saturates.
    """
    (m, k), dtype = x.shape, recipe.dtype(role)
    rows, columns = recipe.tile((m, k), role)
    tiles = x.reshape(m // rows, rows, k // columns, columns)
    found = tiles.abs().amax((1, 3)) if amax is None else amax
    scales = scale_of(found, dtype, power_of_two=recipe.power_of_two)
    largest = torch.finfo(dtype).max
    wide = accumulation_dtype(x.dtype)
    scaled = tiles.to(wide) * (1 / scales).to(wide)[:, None, :, None]
    values = scaled.clamp(-largest, largest).to(dtype).view(m, k)
    return Fp8Tensor(values.contiguous(), scales.t().contiguous().t())


def absolute_maximum(x: Tensor) -> Tensor:
    """[1, 1], float32, in one pass over x."""
    return torch.linalg.vector_norm(x, torch.inf, dtype=accumulation_dtype(x.dtype)).float().view(1, 1)


def record(x: Tensor, maxima: Tensor | None) -> None:
    """Raises `maxima` [MAXIMA], float32, of which only the largest counts, to the absolute maximum of x."""
    if maxima is not None:
        torch.maximum(maxima, absolute_maximum(x).view(1), out=maxima)
