"""Figures on how well operands of products fit into 8 bits, and on the effect on gradients: the driver reads them
without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pentad.kernels.fp8.fp8_tensor import Role  # imports torch


class Fp8Sample(NamedTuple):
    """What was counted of an operand in all products of one rank in a step. `amax` is the absolute maximum, nan if any
    value is not finite; `saturated` values have the largest magnitude of the 8-bit format, `underflowed` ones are
    zero."""

    weight: str  # the parameter whose product it is an operand of
    role: Role
    amax: float
    saturated: int
    underflowed: int
    values: int


class GradientSums(NamedTuple):
    """Sums over the elements of a gradient that one rank counts, in a step that was compared: of the products of the
    8-bit gradient with the one in the compute dtype, and of the squares of both."""

    weight: str
    product: float
    square: float
    wanted_square: float


Key = tuple[str, "Role"]


def merged(samples: Iterable[Fp8Sample]) -> dict[Key, Fp8Sample]:
    """The samples of all ranks combined, by weight and role, in the order of names."""
    found: dict[Key, Fp8Sample] = {}
    for each in samples:
        key = each.weight, each.role
        before = found.get(key)
        if before is not None:
            amax = max(before.amax, each.amax) if before.amax == before.amax else before.amax
            amax = each.amax if each.amax != each.amax else amax
            counts = (a + b for a, b in zip(before[3:], each[3:], strict=True))
            each = Fp8Sample(*key, amax, *counts)
        found[key] = each
    return dict(sorted(found.items()))


def cosines(sums: Iterable[GradientSums]) -> dict[str, float]:
    """The cosines of the angles between the two gradients of each weight, from the sums of all ranks, in the order of
    names; nan if a gradient is zero or not finite."""
    found: dict[str, tuple[float, ...]] = {}
    for weight, *values in sums:
        before = found.get(weight, (0.0, 0.0, 0.0))
        found[weight] = tuple(a + b for a, b in zip(before, values, strict=True))
    return {weight: _cosine(*found[weight]) for weight in sorted(found)}


def _cosine(product: float, square: float, wanted_square: float) -> float:
    length = math.sqrt(square) * math.sqrt(wanted_square)
    return product / length if 0 < length < math.inf else math.nan
