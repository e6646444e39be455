"""The sum of two parts of an attention in Triton: a program takes some queries of one head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit
def _merge(
    out, lse, more, more_lse, N, S, WIDTH: tl.constexpr, o_b, o_n, o_s, l_b, l_n, l_s, m_b, m_n, m_s, n_b, n_n, n_s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // N).to(tl.int64)
    head = (tl.program_id(1) % N).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    own = lse + batch * l_b + head * l_n + row * l_s
    a = tl.load(own, mask=row < S, other=0.0)
    b = tl.load(more_lse + batch * n_b + head * n_n + row * n_s, mask=row < S, other=0.0)
    inside = (row < S)[:, None] & (column < WIDTH)[None, :]
    at = out + batch * o_b + head * o_n + (row * o_s)[:, None] + column[None, :]
    x = tl.load(at, mask=inside, other=0.0)
    y = tl.load(more + batch * m_b + head * m_n + (row * m_s)[:, None] + column[None, :], mask=inside, other=0.0)
    y = y.to(tl.float32)
    share = tl.sigmoid(b - a)  # of the part in the new denominator
    tl.store(at, x + share[:, None] * (y - x), mask=inside)
    top = tl.maximum(a, b)
    tl.store(own, top + tl.log(tl.exp(a - top) + tl.exp(b - top)), mask=row < S)


def merge_partials_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Launches the kernel; see `pentad.kernels.attention.attention_partial.merge_`."""
    assert out.dtype == lse.dtype == more_lse.dtype == torch.float32 and out.stride(3) == more.stride(3) == 1
    batch, heads, rows, width = out.shape
    strides = (*out.stride()[:3], *lse.stride(), *more.stride()[:3], *more_lse.stride())
    grid = (triton.cdiv(rows, ROWS), batch * heads)
    _merge[grid](out, lse, more, more_lse, heads, rows, width, *strides, ROWS=ROWS, BLOCK=triton.next_power_of_2(width))
