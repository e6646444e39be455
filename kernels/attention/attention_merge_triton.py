"""The merge of partial attention results in Triton: a program takes some queries of one head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

ROWS = 32


@triton.jit
def _merge(
    out, lse, other, other_lse, N, S, WIDTH: tl.constexpr, o_b, o_n, o_s, l_b, l_n, l_s, m_b, m_n, m_s, n_b, n_n, n_s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // N).to(tl.int64)
    head = (tl.program_id(1) % N).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    own = lse + batch * l_b + head * l_n + row * l_s
    a = tl.load(own, mask=row < S, other=0.0)
    b = tl.load(other_lse + batch * n_b + head * n_n + row * n_s, mask=row < S, other=0.0)
    inside = (row < S)[:, None] & (column < WIDTH)[None, :]
    target = out + batch * o_b + head * o_n + (row * o_s)[:, None] + column[None, :]
    x = tl.load(target, mask=inside, other=0.0)
    y = tl.load(other + batch * m_b + head * m_n + (row * m_s)[:, None] + column[None, :], mask=inside, other=0.0)
    y = y.to(tl.float32)
    weight = tl.sigmoid(b - a)  # of the other part in the new denominator
    tl.store(target, x + weight[:, None] * (y - x), mask=inside)
    top = tl.maximum(a, b)
    tl.store(own, top + tl.log(tl.exp(a - top) + tl.exp(b - top)), mask=row < S)


def merge_partials_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Launches the kernel; see `pentad.kernels.attention.attention_merge.merge_partials_`."""
    assert out.dtype == lse.dtype == other_lse.dtype == torch.float32
    batch, heads, rows, width = out.shape
    strides = (*out.stride()[:3], *lse.stride(), *other.stride()[:3], *other_lse.stride())
    grid = (ceil_div(rows, ROWS), batch * heads)
    block = triton.next_power_of_2(width)
    _merge[grid](out, lse, other, other_lse, heads, rows, width, *strides, ROWS=ROWS, BLOCK=block)
