"""Recipes of 8-bit products that have kernels, and how near their results are."""

from __future__ import annotations

import torch

from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Tensor, Recipe

RECIPES = [
    Recipe("block"),
    Recipe("block", "e5m2", power_of_two=True),
    Recipe("row", power_of_two=True),
    Recipe("tensor"),
    Recipe("tensor", "e5m2", power_of_two=True),
]


def amax_for(recipe: Recipe, x: torch.Tensor) -> Amax | None:
    """The maxima that the recipe needs; a little less than those of x, so that some values saturate."""
    x = 0.9 * x.abs().float()
    if recipe.scaling == "row":
        return Amax(x.amax(1, keepdim=True), x.amax(0)[:, None].contiguous())
    return Amax(x.amax().view(1, 1), x.amax().view(1, 1)) if recipe.scaling == "tensor" else None


def assert_nearly_equal(found: Fp8Tensor | None, want: Fp8Tensor | None, differing: float = 1e-3) -> None:
    """Equal scales up to rounding in float32; of the values at most a share is rounded to another neighbour."""
    assert found is not None and want is not None
    assert found.values.dtype == want.values.dtype and found.values.shape == want.values.shape
    assert found.scales.shape == want.scales.shape
    torch.testing.assert_close(found.scales, want.scales, rtol=1e-4 if differing else 0, atol=0)
    values, wanted = found.values.float(), want.values.float()
    assert (values != wanted).float().mean().item() <= differing
    dtype = torch.finfo(found.values.dtype)
    torch.testing.assert_close(values, wanted, rtol=2 * dtype.eps, atol=dtype.smallest_normal * dtype.eps)
