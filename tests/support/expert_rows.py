"""Operands of the experts' FP8 products, and how accurate the kernels must be."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.fp8.fp8_cast import forms_of
from pentad.kernels.fp8.fp8_grouped import ExpertMatrices, dequantize_rows, fp8_grouped_gemm
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Recipe, Role, quantize


class Operands(NamedTuple):
    """Rows of T tokens, some of which go to several experts, and unused rows at the end, which contain NaN."""

    x: Fp8Tensor  # [T, K]
    dy: Fp8Tensor  # [R, N]
    weights: ExpertMatrices  # [E, N, K]
    offsets: Tensor
    tokens: Tensor  # [R]

    def on(self, device: str) -> Operands:
        x, dy = (Fp8Tensor(*(each.to(device) for each in pair)) for pair in (self.x, self.dy))
        weights = ExpertMatrices(*(Fp8Tensor(*(each.to(device) for each in form)) for form in self.weights))
        return Operands(x, dy, weights, self.offsets.to(device), self.tokens.to(device))


def operands(counts: tuple[int, ...], tokens: int, n: int, k: int, recipe: Recipe) -> Operands:
    def cast(rows: int, width: int, role: Role) -> Fp8Tensor:
        return quantize(torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None], recipe, role)

    used, experts = sum(counts), len(counts)
    weights = ExpertMatrices.of(forms_of(torch.randn(experts * n, k), recipe, "weight"), experts)
    dy = cast(used + 3, n, "gradient")
    dy.scales[used:] = torch.nan
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return Operands(cast(tokens, k, "activation"), dy, weights, offsets, torch.randint(tokens, (used + 3,)))


def assert_products_agree(twin: ModuleType, given: Operands, on: Operands, dtype: torch.dtype, bound: float) -> None:
    """Compares F, the input gradient and the operands of W by the kernels of `twin`, on the operands `on` a device,
    with the float64 reference on the `given` ones."""
    used, wide = int(given.offsets[-1]), torch.float64
    found = twin.fp8_grouped_gemm(on.x, on.weights.rows, on.offsets, dtype, on.tokens)
    want = fp8_grouped_gemm(given.x, given.weights.rows, given.offsets, wide, given.tokens)
    error = relative_error(found[:used].cpu(), want[:used])
    assert error < bound, error
    found = twin.fp8_grouped_gemm(on.dy, on.weights.columns, on.offsets, dtype)
    want = fp8_grouped_gemm(given.dy, given.weights.columns, given.offsets, wide)
    error = relative_error(found[:used].cpu(), want[:used])
    assert error < bound, error
    for tensor, at, index in (("x", on.tokens, given.tokens), ("dy", None, None)):
        found = twin.dequantize_rows(getattr(on, tensor), on.offsets, dtype, at)
        want = dequantize_rows(getattr(given, tensor), given.offsets, dtype, index)
        assert torch.equal(found[:used].cpu(), want[:used]), "also the rounding"
