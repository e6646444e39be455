"""RMSNorms of heads and their rotation in Triton: a program takes some heads, the halves of each side by side."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.rms_norm_triton import PROGRAMS, _sum_rows

TILE = 2048  # pairs that a program holds at once
# The backward pass keeps more tensors in registers; its programs are few, and fetch the next heads while they work.
WARPS, BACKWARD_WARPS, STAGES = 4, 8, 3


@triton.jit
def _places(rows, pairs, count, S, token_stride, head_stride, N: tl.constexpr, HALF: tl.constexpr):
    """(offsets of the first halves of heads, those of their copies, those of their angles, the mask of those that
    exist)"""
    token, head = rows // N, rows % N
    heads = (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + pairs[None, :]
    copies = rows.to(tl.int64)[:, None] * (2 * HALF) + pairs[None, :]
    mask = (rows < count)[:, None] & (pairs < HALF)[None, :]
    return heads, copies, (token % S)[:, None] * HALF + pairs[None, :], mask


@triton.jit
def _forward(
    x, weight, kept, rstd, cos, sin, count, S, eps, token_stride, head_stride,
    N: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, copy, angle, mask = _places(rows, pairs, count, S, token_stride, head_stride, N, HALF)
    a, b = tl.load(x + at, mask=mask, other=0.0), tl.load(x + HALF + at, mask=mask, other=0.0)
    tl.store(kept + copy, a, mask=mask)
    tl.store(kept + HALF + copy, b, mask=mask)
    a, b = a.to(tl.float32), b.to(tl.float32)
    r = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
    tl.store(rstd + rows, r, mask=rows < count)
    first = tl.load(weight + pairs, mask=pairs < HALF, other=0.0).to(tl.float32) + OFFSET
    second = tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32) + OFFSET
    # Rounded as if a separate norm had written them.
    a = (a * r[:, None] * first[None, :]).to(x.dtype.element_ty).to(tl.float32)
    b = (b * r[:, None] * second[None, :]).to(x.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + at, (a * c - b * s).to(x.dtype.element_ty), mask=mask)
    tl.store(x + HALF + at, (b * c + a * s).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dx, weight, kept, rstd, cos, sin, partial, count, S, token_stride, head_stride,
    N: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program, pairs = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(weight + pairs, mask=pairs < HALF, other=0.0).to(tl.float32) + OFFSET
    second = tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32) + OFFSET
    dfirst, dsecond = tl.zeros([ROWS, BLOCK], dtype=tl.float32), tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in tl.range(program * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        at, copy, angle, mask = _places(rows, pairs, count, S, token_stride, head_stride, N, HALF)
        a = tl.load(dx + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(dx + HALF + at, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        # Rounded as if a separate rotation had written them.
        da = (a * c + b * s).to(dx.dtype.element_ty).to(tl.float32)
        db = (b * c - a * s).to(dx.dtype.element_ty).to(tl.float32)
        r = tl.load(rstd + rows, mask=rows < count, other=0.0)[:, None]
        x = tl.load(kept + copy, mask=mask, other=0.0).to(tl.float32) * r
        y = tl.load(kept + HALF + copy, mask=mask, other=0.0).to(tl.float32) * r
        dfirst += da * x
        dsecond += db * y
        da *= first[None, :]
        db *= second[None, :]
        mean = ((tl.sum(da * x, axis=1) + tl.sum(db * y, axis=1)) / (2 * HALF))[:, None]
        tl.store(dx + at, (r * (da - x * mean)).to(dx.dtype.element_ty), mask=mask)
        tl.store(dx + HALF + at, (r * (db - y * mean)).to(dx.dtype.element_ty), mask=mask)
    out = partial + program * (2 * HALF) + pairs
    tl.store(out, tl.sum(dfirst, axis=0), mask=pairs < HALF)
    tl.store(out + HALF, tl.sum(dsecond, axis=0), mask=pairs < HALF)


def norm_and_rotate_(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.heads.qk_norm_rope.norm_and_rotate_`."""
    _, heads, width = x.shape
    count, half, block, rows = _sizes(x, cos)
    kept = torch.empty(count, width, dtype=x.dtype, device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    _forward[(ceil_div(count, rows),)](
        x, weight, kept, rstd, cos, sin, count, cos.shape[0], eps, x.stride(0), x.stride(1),
        N=heads, HALF=half, OFFSET=offset, ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return kept, rstd


def norm_and_rotate_backward_(
    dx: Tensor, rows: Tensor, weight: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor, offset: float = 0.0
) -> Tensor:
    """Launches the kernel, and sums its partial rows; see `norm_and_rotate_backward_` of
    `pentad.kernels.heads.qk_norm_rope`."""
    _, heads, width = dx.shape
    count, half, block, held = _sizes(dx, cos)
    programs = min(PROGRAMS, ceil_div(count, held))
    partial = torch.empty(programs, width, dtype=torch.float32, device=dx.device)
    dweight = torch.empty(width, dtype=torch.float32, device=dx.device)
    _backward[(programs,)](
        dx, weight, rows, rstd, cos, sin, partial, count, cos.shape[0], dx.stride(0), dx.stride(1),
        N=heads, HALF=half, OFFSET=offset, ROWS=held, BLOCK=block, STAGES=STAGES, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    _sum_rows[(ceil_div(width, 32),)](partial, dweight, programs, width, ROWS=64, BLOCK=32, num_warps=4)
    return dweight


def _sizes(x: Tensor, cos: Tensor) -> tuple[int, int, int, int]:
    """(heads of all tokens, half of a head, columns of a program, heads of a program)"""
    tokens, heads, width = x.shape
    half = width // 2
    assert width % 2 == 0 and cos.shape[1] == half
    block = max(16, triton.next_power_of_2(half))
    return tokens * heads, half, block, max(1, TILE // block)
