"""Products of experts in 8 bits: laws of the reference, and on a GPU the kernels against it."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from expert_rows import assert_products_agree, operands
from fp8_recipes import assert_nearly_equal

from pentad.kernels.fp8 import fp8_expert_glu_triton, fp8_grouped_triton
from pentad.kernels.fp8.fp8_expert_glu import fp8_weighted_glu, fp8_weighted_glu_backward
from pentad.kernels.fp8.fp8_grouped import dequantize_rows, fp8_grouped_gemm
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Recipe
from pentad.kernels.moe.grouped_gemm import grouped_gemm

BLOCKS = [Recipe("block"), Recipe("block", "e5m2", power_of_two=True)]


@pytest.mark.parametrize("recipe", BLOCKS)
def test_products_are_those_of_the_numbers_that_the_operands_stand_for(recipe: Recipe) -> None:
    given, wide = operands((3, 0, 40), 128, 256, 384, recipe), torch.float64
    x, dy = given.x.dequantize(wide)[given.tokens], given.dy.dequantize(wide)
    for found, rows, form in (
        (fp8_grouped_gemm(given.x, given.weights.rows, given.offsets, wide, given.tokens), x, given.weights.rows),
        (fp8_grouped_gemm(given.dy, given.weights.columns, given.offsets, wide), dy, given.weights.columns),
    ):
        pairs = zip(form.values, form.scales, strict=True)
        dense = torch.stack([Fp8Tensor(*each).dequantize(wide) for each in pairs])
        assert relative_error(found[:43], grouped_gemm(rows, dense, given.offsets)[:43]) < 1e-12
    assert torch.equal(dequantize_rows(given.x, given.offsets, wide, given.tokens), x)
    assert dequantize_rows(given.x, torch.zeros(2, dtype=torch.int32), wide, given.tokens[:0]).shape == (0, 384)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [((3, 0, 5), 128, 128), ((1, 130, 0, 2, 65), 256, 384), ((700, 0, 1000, 317), 2816, 2048), ((4,), 128, 1408)],
)
def test_triton_multiplies_as_the_reference_does(recipe: Recipe, counts: tuple[int, ...], n: int, k: int) -> None:
    given = operands(counts, 512, n, k, recipe)
    on = given.on("cuda")
    assert_products_agree(fp8_grouped_triton, given, on, torch.bfloat16, 4e-3)
    # Tensor cores accumulate products of FP8 numbers with about 14 bits.
    assert_products_agree(fp8_grouped_triton, given, on, torch.float32, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("width", [128, 768, 1408, 14336])
def test_triton_fuses_casts_as_the_reference_does(recipe: Recipe, width: int) -> None:
    used, offsets = 300, torch.tensor([100, 100, 300], dtype=torch.int32, device="cuda")
    gate_up, dy, weights = (
        torch.randn(512, 2 * width, device="cuda").bfloat16(),
        torch.randn(512, width, device="cuda").bfloat16(),
        torch.rand(512, device="cuda"),
    )
    gate_up[used:], dy[used:] = torch.nan, torch.nan
    found = fp8_expert_glu_triton.fp8_weighted_glu(gate_up, weights, offsets, recipe)
    *casts, dweights = fp8_expert_glu_triton.fp8_weighted_glu_backward(dy, gate_up, weights, offsets, recipe)
    gate_up, dy, weights, offsets = (each.cpu() for each in (gate_up, dy, weights, offsets))
    want = fp8_weighted_glu(gate_up, weights, offsets, recipe)
    *wanted, want_dweights = fp8_weighted_glu_backward(dy, gate_up, weights, offsets, recipe)
    for a, b in zip((found, *casts), (want, *wanted), strict=True):
        found, want = (Fp8Tensor(*(part[:used].cpu() for part in each)) for each in (a, b))
        assert_nearly_equal(found, want, differing=5e-3)
    torch.testing.assert_close(dweights[:used].cpu(), want_dweights[:used], rtol=1e-3, atol=1e-3)
