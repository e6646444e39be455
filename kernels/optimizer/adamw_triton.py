"""AdamW in Triton: one launch over a flat shard, every tensor read once and written once."""

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import NO_FMA, ceil_div
from pentad.kernels.optimizer.param_remainders_triton import load, parts, rounded, store

# Four elements a thread: tensors of 4 and 2 bytes then have one layout, and the cast needs no reshuffling.
BLOCK = 1024
WARPS = 8


@triton.jit
def _update(
    master, low, m, v, grad, out, mask, s, decay, first, second, size, unbias, eps,
    CAST: tl.constexpr, OPTIMISTIC: tl.constexpr,
):  # fmt: skip
    g = tl.load(grad, mask=mask).to(tl.float32) * s
    new_m = tl.load(m, mask=mask).to(tl.float32)
    new_v = tl.load(v, mask=mask).to(tl.float32)
    p = load(master, low, mask)
    new_m += (g - new_m) * first
    new_v += (g * g - new_v) * second
    p = p - decay * p - size * new_m / (tl.sqrt(new_v) * unbias + eps)
    if not OPTIMISTIC:
        tl.store(m, new_m.to(m.dtype.element_ty), mask=mask)
        tl.store(v, new_v.to(v.dtype.element_ty), mask=mask)
        store(master, low, p, mask)
    if CAST:
        tl.store(out, rounded(p, out.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    master, low, m, v, grad, out, scale, n, decay, first, second, size, unbias, eps,
    BLOCK: tl.constexpr, CAST: tl.constexpr, OPTIMISTIC: tl.constexpr,
):  # fmt: skip
    s = 1.0 if OPTIMISTIC else tl.load(scale).to(tl.float32)
    if tl.abs(s) < float("inf"):
        start = tl.program_id(0).to(tl.int64) * BLOCK
        lanes = tl.arange(0, BLOCK)
        master += start
        m += start
        v += start
        grad += start
        if low is not None:
            low += start
        if CAST:
            out += start
        # Only the last program masks: with an odd n, masks would cost all programs their 16-byte accesses.
        if start + BLOCK <= n:
            _update(
                master + lanes, low + lanes if low is not None else None, m + lanes, v + lanes, grad + lanes,
                out + lanes if CAST else out, None,
                s, decay, first, second, size, unbias, eps, CAST, OPTIMISTIC,
            )  # fmt: skip
        else:
            _update(
                master + lanes, low + lanes if low is not None else None, m + lanes, v + lanes, grad + lanes,
                out + lanes if CAST else out, lanes < n - start,
                s, decay, first, second, size, unbias, eps, CAST, OPTIMISTIC,
            )  # fmt: skip


def adamw_(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, out: Tensor | None, scale: Tensor, c: tuple[float, ...]
) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.adamw.adamw_`."""
    n, (values, low) = master.numel(), parts(master)
    _step[(ceil_div(n, BLOCK),)](
        values, low, m, v, grad, out, scale, n, *c,
        BLOCK=BLOCK, CAST=out is not None, OPTIMISTIC=False, num_warps=WARPS, **NO_FMA,
    )  # fmt: skip


def adamw_optimistic_(out: Tensor, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: tuple[float, ...]) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.adamw.adamw_optimistic_`."""
    n = master.numel()
    _step[(ceil_div(n, BLOCK),)](
        master, None, m, v, grad, out, grad, n, *c,
        BLOCK=BLOCK, CAST=True, OPTIMISTIC=True, num_warps=WARPS, **NO_FMA,
    )  # fmt: skip
