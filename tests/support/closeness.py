"""The error of a result relative to its expected value."""

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in float64."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
