"""Scales of 8-bit numbers in kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pentad.kernels.fp8 import fp8_tensor

TINY = tl.constexpr(fp8_tensor.TINY)


class Scaling(NamedTuple):
    """How values are scaled: by maxima that are `given`, `stride` apart from one row or column to the next, or else by
    those of tiles. `limit` is the largest number of the 8-bit dtype."""

    given: bool
    stride: int
    limit: float
    power_of_two: bool


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """(the scale, the factor by which values are multiplied before the cast)"""
    scale = tl.maximum(amax, TINY, propagate_nan=tl.PropagateNan.ALL) * (1.0 / LIMIT)
    if POWER:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)  # NaN stays NaN
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """Clamps x to `LIMIT`; NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
