"""Muon's element-wise updates in Triton: one launch each over a flat shard."""

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import NO_FMA, ceil_div
from pentad.kernels.optimizer.muon import MuonCoefficients
from pentad.kernels.optimizer.param_remainders_triton import load, parts, rounded, store

BLOCK = 1024


@triton.jit
def _direction(out, momentum, grad, scale, n, first, blend, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(grad + at, mask=mask).to(tl.float32) * tl.load(scale).to(tl.float32)
    b = tl.load(momentum + at, mask=mask).to(tl.float32)
    b += (g - b) * first
    tl.store(out + at, (g + (b - g) * blend).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _optimistic(out, master, direction, n, decay, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    p = _new_master(tl.load(master + at, mask=mask), tl.load(direction + at, mask=mask), decay, size)
    tl.store(out + at, rounded(p, out.dtype.element_ty), mask=mask)


@triton.jit
def _new_master(master, direction, decay, size):
    return master - decay * master - size * direction.to(tl.float32)


@triton.jit
def _step(
    master, low, momentum, grad, direction, out, scale, n, decay, first, size,
    BLOCK: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    s = tl.load(scale).to(tl.float32)
    if tl.abs(s) < float("inf"):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        g = tl.load(grad + at, mask=mask).to(tl.float32) * s
        b = tl.load(momentum + at, mask=mask).to(tl.float32)
        rest = low + at if low is not None else None
        p = _new_master(load(master + at, rest, mask), tl.load(direction + at, mask=mask), decay, size)
        b += (g - b) * first
        tl.store(momentum + at, b.to(momentum.dtype.element_ty), mask=mask)
        store(master + at, rest, p, mask)
        if CAST:
            tl.store(out + at, rounded(p, out.dtype.element_ty), mask=mask)


def muon_direction_(out: Tensor, momentum: Tensor, grad: Tensor, scale: Tensor, c: MuonCoefficients) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.muon.muon_direction_`."""
    n = out.numel()
    _direction[(ceil_div(n, BLOCK),)](out, momentum, grad, scale, n, c.first, c.blend, BLOCK=BLOCK, **NO_FMA)


def muon_optimistic_(out: Tensor, master: Tensor, direction: Tensor, c: MuonCoefficients) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.muon.muon_optimistic_`."""
    n = out.numel()
    _optimistic[(ceil_div(n, BLOCK),)](out, master, direction, n, c.decay, c.size, BLOCK=BLOCK, **NO_FMA)


def muon_(
    master: Tensor,
    momentum: Tensor,
    grad: Tensor,
    direction: Tensor,
    out: Tensor | None,
    scale: Tensor,
    c: MuonCoefficients,
) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.muon.muon_`."""
    n, (values, low) = master.numel(), parts(master)
    _step[(ceil_div(n, BLOCK),)](
        values, low, momentum, grad, direction, out, scale, n, c.decay, c.first, c.size,
        BLOCK=BLOCK, CAST=out is not None, **NO_FMA,
    )  # fmt: skip
