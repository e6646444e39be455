"""The sum of gradient shards in Triton: every part is read once."""

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

BLOCK = 2048
WARPS = 8


@triton.jit
def _add(
    out, own, others, stride, n, POSITION: tl.constexpr, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if ACCUMULATE:
        total = tl.load(out + index, mask=mask).to(tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == POSITION:
            total += tl.load(own + index, mask=mask).to(tl.float32)
        else:
            total += tl.load(others + (rank - (rank > POSITION)) * stride + index, mask=mask).to(tl.float32)
    tl.store(out + index, total, mask=mask)


def add_shards_(out: Tensor, own: Tensor, others: Tensor, position: int, *, accumulate: bool) -> None:
    """Launches the kernel; see `pentad.kernels.optimizer.add_shards.add_shards_`."""
    grid = (ceil_div(out.numel(), BLOCK),)
    _add[grid](
        out, own, others, others.stride(0), out.numel(), POSITION=position, RANKS=others.shape[0] + 1,
        ACCUMULATE=accumulate, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
