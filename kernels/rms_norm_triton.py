"""RMSNorm in Triton: a program holds full rows, so every tensor is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

# Elements a program holds at once (always at least one row), and elements a thread holds of each tensor: fewer in
# the backward pass, which keeps five tensors in registers and would spill.
TILE = 4096
PER_THREAD = 16
PER_THREAD_BACKWARD = 8
WIDEST_ROW = 65536
# The backward pass fetches the next rows into shared memory while it works on these, if a tile has at most this many
# bytes.
PREFETCHED_BYTES = 32768
# Backward programs, each of which sums its share of dweight: two for each of the 132 SMs of a Hopper GPU. A constant,
# so that the order of the sum, and hence the last bit, does not depend on the device.
PROGRAMS = 264


@triton.jit
def normed_rows(
    x, residual, weight, summed, rstd, T, eps,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(the normed rows of this program [ROWS, BLOCK], their offsets, the mask of those that exist); writes `rstd` and,
    with ADD, `summed`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (columns < H)[None, :]
    offsets = rows.to(tl.int64)[:, None] * H + columns[None, :]
    s = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        s += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = s.to(summed.dtype.element_ty)
        tl.store(summed + offsets, rounded, mask=mask)
        s = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32) + OFFSET
    r = tl.rsqrt(tl.sum(s * s, axis=1) / H + eps)
    tl.store(rstd + rows, r, mask=rows < T)
    return s * r[:, None] * w[None, :], offsets, mask


@triton.jit
def _forward(
    x, residual, weight, y, summed, rstd, T, eps,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    normed, offsets, mask = normed_rows(x, residual, weight, summed, rstd, T, eps, H, ROWS, BLOCK, ADD, OFFSET)
    tl.store(y + offsets, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy, summed, weight, rstd, dresidual, dx, y, partial, T,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, AGAIN: tl.constexpr,
    OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in tl.range(program * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & (columns < H)[None, :]
        offsets = rows.to(tl.int64)[:, None] * H + columns[None, :]
        r = tl.load(rstd + rows, mask=rows < T, other=0.0)[:, None]
        d = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(summed + offsets, mask=mask, other=0.0).to(tl.float32) * r
        if AGAIN:
            tl.store(y + offsets, (normed * w[None, :]).to(y.dtype.element_ty), mask=mask)
        dw += d * normed
        g = d * w[None, :]
        g = r * (g - normed * (tl.sum(g * normed, axis=1)[:, None] / H))
        if ADD:
            g += tl.load(dresidual + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + program * H + columns, tl.sum(dw, axis=0), mask=columns < H)


@triton.jit
def _sum_rows(partial, out, count, H, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < count)[:, None] & (columns < H)[None, :]
        total += tl.load(partial + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(out + columns, tl.sum(total, axis=0), mask=columns < H)


def shape_of(width: int, per_thread: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program for rows of `width` elements, `per_thread` of them a thread if they fit."""
    assert width <= WIDEST_ROW, f"a row of {width} elements does not fit one program, at most {WIDEST_ROW} do"
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, TILE // block)
    return rows, block, min(32, rows * block // (32 * per_thread))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel; see `pentad.kernels.rms_norm.rms_norm`."""
    tokens, width = x.shape
    rows, block, warps = shape_of(width, PER_THREAD)
    y = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _forward[(ceil_div(tokens, rows),)](
        x, residual, weight, y, summed, rstd, tokens, eps,
        H=width, ROWS=rows, BLOCK=block, ADD=residual is not None, OFFSET=offset, num_warps=warps,
    )  # fmt: skip
    return y, summed, rstd


def rms_norm_backward(
    dy: Tensor,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None = None,
    offset: float = 0.0,
    again: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the backward kernel and the sum of its partial rows; see `pentad.kernels.rms_norm.rms_norm_backward`."""
    tokens, width = dy.shape
    rows, block, warps = shape_of(width, PER_THREAD_BACKWARD)
    programs = min(PROGRAMS, ceil_div(tokens, rows))
    stages = 2 if rows * block * dy.element_size() <= PREFETCHED_BYTES else 1
    dx = torch.empty_like(summed)
    partial = torch.empty(programs, width, dtype=torch.float32, device=dy.device)
    dweight = torch.empty(width, dtype=torch.float32, device=dy.device)
    _backward[(programs,)](
        dy, summed, weight, rstd, dresidual, dx, again, partial, tokens,
        H=width, ROWS=rows, BLOCK=block, ADD=dresidual is not None, AGAIN=again is not None, OFFSET=offset,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    _sum_rows[(ceil_div(width, 32),)](partial, dweight, programs, width, ROWS=64, BLOCK=32, num_warps=4)
    return dx, dweight
