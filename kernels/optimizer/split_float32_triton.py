"""SplitFloat32 in Triton: reading, writing and rounding its numbers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.optimizer import split_float32
from pentad.kernels.optimizer.split_float32 import SplitFloat32

HALF = tl.constexpr(split_float32.HALF)
NAN = tl.constexpr(split_float32.NAN)


def parts(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What `load` and `store` get of a tensor: both parts, or the tensor of float32 alone."""
    return (x.high, x.low) if isinstance(x, SplitFloat32) else (x, None)


@triton.jit
def load(x, low, mask, SPLIT: tl.constexpr):
    """float32 numbers: at pointers `x`, or if they are SPLIT the parts at `x` and `low`."""
    found = tl.load(x, mask=mask)
    if SPLIT:
        bits = found.to(tl.int16, bitcast=True).to(tl.int32) << 16
        found = (bits + tl.load(low, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    return found


@triton.jit
def store(x, low, values, mask, SPLIT: tl.constexpr):
    if SPLIT:
        bits = _bits(values)
        high = _high(bits)
        tl.store(x, high.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low, (bits - (high.to(tl.int32) << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(x, values, mask=mask)


@triton.jit
def nearest(values, dtype: tl.constexpr):
    """float32 numbers in another dtype, as `pentad.kernels.optimizer.split_float32.nearest`."""
    return _high(_bits(values)).to(tl.bfloat16, bitcast=True) if dtype == tl.bfloat16 else values.to(dtype)


@triton.jit
def _bits(values):
    return tl.where(values != values, NAN, values.to(tl.int32, bitcast=True))


@triton.jit
def _high(bits):
    return ((bits + HALF) >> 16).to(tl.int16)
