"""The Triton kernels of experts in 8 bits on a machine without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("runs without a GPU", allow_module_level=True)
pytest.importorskip("triton")

from expert_rows import assert_products_agree, operands
from fp8_recipes import assert_nearly_equal

from pentad.kernels.fp8 import fp8_expert_glu_triton, fp8_grouped_triton
from pentad.kernels.fp8.fp8_expert_glu import fp8_weighted_glu, fp8_weighted_glu_backward
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Recipe

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter", "nearest_numbers")
RECIPES = [Recipe("block"), pytest.param(Recipe("block", "e5m2", power_of_two=True), marks=pytest.mark.slow)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [(3, 0, 135, 64), (0, 0)])
def test_products(recipe: Recipe, counts: tuple[int, ...]) -> None:
    given = operands(counts, 128, 256, 384, recipe)
    assert_products_agree(fp8_grouped_triton, given, given, torch.float32, 1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", [128, 1152])
def test_gated_linear_units(recipe: Recipe, width: int) -> None:
    used, offsets = 5, torch.tensor([2, 2, 5], dtype=torch.int32)
    gate_up, dy, weights = torch.randn(8, 2 * width), torch.randn(8, width), torch.rand(8)
    gate_up[used:], dy[used:] = torch.nan, torch.nan
    found = fp8_expert_glu_triton.fp8_weighted_glu(gate_up, weights, offsets, recipe)
    want = fp8_weighted_glu(gate_up, weights, offsets, recipe)
    *casts, dweights = fp8_expert_glu_triton.fp8_weighted_glu_backward(dy, gate_up, weights, offsets, recipe)
    *wanted, want_dweights = fp8_weighted_glu_backward(dy, gate_up, weights, offsets, recipe)
    for a, b in zip((found, *casts), (want, *wanted), strict=True):
        found, want = (Fp8Tensor(*(part[:used] for part in each)) for each in (a, b))
        assert_nearly_equal(found, want)
    torch.testing.assert_close(dweights[:used], want_dweights[:used])
