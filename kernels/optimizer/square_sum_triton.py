"""The sum of the squares of gradients in Triton: one read, and a float64 number from each program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

BLOCK, BLOCKS, WARPS = 2048, 16, 8


@triton.jit
def _sum(flat, sums, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for block in range(BLOCKS):
        index = (program * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(flat + index, mask=index < n, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + program, tl.sum(total, 0))


def square_sum(flat: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.optimizer.square_sum.square_sum`."""
    programs = max(1, ceil_div(flat.numel(), BLOCK * BLOCKS))
    sums = torch.empty(programs, dtype=torch.float64, device=flat.device)
    _sum[(programs,)](flat, sums, flat.numel(), BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=WARPS)
    return sums.sum()
