"""SplitFloat32 in Triton: reading, writing and rounding its numbers, alone or in an update."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.optimizer import param_remainders
from pentad.kernels.optimizer.param_remainders import SplitFloat32

HALF = tl.constexpr(param_remainders.HALF)
NAN = tl.constexpr(param_remainders.NAN)
BLOCK = 2048


def parts(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What `load` and `store` take for a tensor: both parts, or a float32 tensor alone."""
    return (x.high, x.low) if isinstance(x, SplitFloat32) else (x, None)


@triton.jit
def load(x, low, mask):
    """float32 numbers at pointers `x`; with `low`, those of which `x` and `low` are the parts."""
    found = tl.load(x, mask=mask)
    if low is not None:
        bits = found.to(tl.int16, bitcast=True).to(tl.int32) << 16
        found = (bits + tl.load(low, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    return found


@triton.jit
def store(x, low, values, mask):
    if low is not None:
        bits = _bits(values)
        high = _high(bits)
        tl.store(x, high.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low, (bits - (high.to(tl.int32) << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(x, values, mask=mask)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 numbers in another dtype, like `nearest`."""
    return _high(_bits(values)).to(tl.bfloat16, bitcast=True) if dtype == tl.bfloat16 else values.to(dtype)


@triton.jit
def _bits(values):
    return tl.where(values != values, NAN, values.to(tl.int32, bitcast=True))


@triton.jit
def _high(bits):
    return ((bits + HALF) >> 16).to(tl.int16)


@triton.jit
def _join(high, low, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, load(high + at, low + at, at < n), mask=at < n)


@triton.jit
def _nearest(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, rounded(tl.load(x + at, mask=at < n), out.dtype.element_ty), mask=at < n)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.optimizer.param_remainders.join`."""
    out, n = torch.empty_like(high, dtype=torch.float32), high.numel()
    if n:
        _join[(ceil_div(n, BLOCK),)](high, low, out, n, BLOCK=BLOCK)
    return out


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Launches the kernel; see `pentad.kernels.optimizer.param_remainders.nearest`."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x.to(dtype)
    out, n = torch.empty_like(x, dtype=dtype), x.numel()
    if n:
        _nearest[(ceil_div(n, BLOCK),)](x, out, n, BLOCK=BLOCK)
    return out
