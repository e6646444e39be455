"""Rotary position embedding in Triton: a program rotates a few heads, both halves of each at once."""

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

# Pairs that a program rotates; with 4 warps a thread moves two 16-byte vectors of each half in bf16.
TILE = 2048


@triton.jit
def _rotate(
    x, cos, sin, count, S, token_stride, head_stride,
    N: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (pairs < HALF)[None, :]
    token = rows // N
    head = rows % N
    angle = (token % S)[:, None] * HALF + pairs[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    first = x + (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + pairs[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (b * c + a * s).to(x.dtype.element_ty), mask=mask)


def rope_(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
    """Launches the kernel; see `pentad.kernels.attention.rope.rope_`."""
    tokens, heads, width = x.shape
    half = width // 2
    assert width % 2 == 0 and cos.shape[1] == half
    block = max(16, triton.next_power_of_2(half))
    rows = max(1, TILE // block)
    _rotate[(ceil_div(tokens * heads, rows),)](
        x, cos, sin, tokens * heads, cos.shape[0], x.stride(0), x.stride(1),
        N=heads, HALF=half, ROWS=rows, BLOCK=block, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
