"""FP8 recipes that have kernels, and how accurate their results are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import MAXIMA, Amax, Fp8Tensor, Recipe

RECIPES = [
    Recipe("block"),
    Recipe("block", "e5m2", power_of_two=True),
    Recipe("row", power_of_two=True),
    Recipe("tensor"),
    Recipe("tensor", "e5m2", power_of_two=True),
]


def amax_for(recipe: Recipe, x: torch.Tensor) -> Amax | None:
    """The maxima that the recipe needs, slightly below those of x, so that some values saturate."""
    x = 0.9 * x.abs().float()
    if recipe.scaling == "row":
        return Amax(x.amax(1, keepdim=True), x.amax(0)[:, None].contiguous())
    return Amax(x.amax().view(1, 1), x.amax().view(1, 1)) if recipe.scaling == "tensor" else None


class Casting(NamedTuple):
    """The modules whose functions cast: the references or their Triton twins."""

    cast: Any
    norm: Any
    glu: Any

    def recorded(
        self, recipe: Recipe, x: Tensor, residual: Tensor, dy: Tensor, weight: Tensor
    ) -> list[tuple[Fp8Tensor | None, Tensor]]:
        """Forms scaled by given maxima, and the maxima that each kernel records; from two calls, the first with smaller
        numbers."""
        amax, gate_up = torch.ones(1, 1, device=x.device), torch.cat((x, residual), 1)
        both, found = Amax(amax, amax), list[tuple[Fp8Tensor | None, Tensor]]()
        maxima = torch.zeros(4, MAXIMA, device=x.device)
        for size in (0.125, 1.0):
            forms = self.cast.fp8_cast(size * x, recipe, "gradient", both, maxima=maxima[0])
            rows = self.cast.fp8_cast(x, recipe, "activation", both, columns=False).rows
            normed, *_ = self.norm.fp8_rms_norm(x, size * weight, 1e-5, recipe, amax, residual, 0.0, maxima[1])
            gated = self.glu.fp8_glu(size * gate_up, recipe, "silu", amax, maxima[2])
            given = size * dy, gate_up, recipe, "silu", (both, amax), maxima[3]
            gradient, y = self.glu.fp8_glu_backward(*given)
            made = [[*forms, rows], [normed], [gated], [*gradient, y]]
            found += [(form, maxima[i].amax()) for i, each in enumerate(made) for form in each]
        return found


def assert_nearly_equal(found: Fp8Tensor | None, want: Fp8Tensor | None, differing: float = 1e-3) -> None:
    """Asserts equal scales up to float32 rounding, and that at most a fraction `differing` of values is rounded to
    another neighbour."""
    assert found is not None and want is not None
    assert found.values.dtype == want.values.dtype and found.values.shape == want.values.shape
    assert found.scales.shape == want.scales.shape
    torch.testing.assert_close(found.scales, want.scales, rtol=1e-4 if differing else 0, atol=0)
    values, wanted = found.values.float(), want.values.float()
    assert (values != wanted).float().mean().item() <= differing
    dtype = torch.finfo(found.values.dtype)
    torch.testing.assert_close(values, wanted, rtol=2 * dtype.eps, atol=dtype.smallest_normal * dtype.eps)
