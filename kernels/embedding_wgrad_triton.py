"""The gradient of an embedding in Triton: tokens are sorted, and a program adds the rows of one token, in their order.

Runs of a token, such as one that pads sequences, may be long: the chunks of a run after its first one are summed
beforehand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div

CHUNK = 64  # tokens
ROWS = 8  # that are read at once
BLOCK = 512  # columns of a program


@triton.jit
def _sum_of_chunk(dy, tokens, order, start, token, columns, T, H, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """(the sum of the rows of a token from `start` to the end of its run or of the chunk [columns], that end)"""
    chunk_end = (start // CHUNK + 1) * CHUNK
    places = start + tl.arange(0, CHUNK)
    found = tl.load(tokens + places, mask=(places < T) & (places < chunk_end), other=-1)
    end = start + tl.sum((found == token).to(tl.int32), 0)
    total = tl.zeros_like(columns).to(tl.float32)
    for first in range(start, end, ROWS):
        place = first + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < end, other=0)
        mask = (place < end)[:, None] & (columns < H)[None, :]
        total += tl.sum(tl.load(dy + row[:, None] * H + columns[None, :], mask=mask, other=0.0).to(tl.float32), 0)
    return total, end


@triton.jit
def _further_chunks(dy, tokens, order, sums, T, H, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the first rows of a chunk that belong to the run of the chunk before."""
    start = (tl.program_id(0) + 1) * CHUNK
    token = tl.load(tokens + start)
    if (token < 0) | (token != tl.load(tokens + start - 1)):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, _ = _sum_of_chunk(dy, tokens, order, start, token, columns, T, H, CHUNK, ROWS)
    tl.store(sums + (start // CHUNK).to(tl.int64) * H + columns, total, mask=columns < H)


@triton.jit
def _add(main, dy, tokens, order, sums, T, H, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the rows of a token, if its run begins here."""
    start = tl.program_id(0)
    token = tl.load(tokens + start)
    if (token < 0) | (token == tl.load(tokens + start - 1, mask=start > 0, other=-1)):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, end = _sum_of_chunk(dy, tokens, order, start, token, columns, T, H, CHUNK, ROWS)
    following = tl.load(tokens + end, mask=end < T, other=-1)
    while following == token:
        total += tl.load(sums + (end // CHUNK).to(tl.int64) * H + columns, mask=columns < H, other=0.0)
        end += CHUNK
        following = tl.load(tokens + end, mask=end < T, other=-1)
    target = main + token.to(tl.int64) * H + columns
    tl.store(target, tl.load(target, mask=columns < H, other=0.0) + total, mask=columns < H)


def accumulate_embedding_gradient_(main: Tensor, dy: Tensor, tokens: Tensor, *, overwrite: bool = False) -> None:
    """Launches the kernels; see `pentad.kernels.embedding_wgrad.accumulate_embedding_gradient_`."""
    count, width = dy.shape
    if overwrite:
        main.zero_()
    if not count:
        return
    tokens, order = tokens.to(torch.int32).sort(stable=True)
    chunks, blocks = ceil_div(count, CHUNK), ceil_div(width, BLOCK)
    sums = torch.empty(chunks, width, dtype=torch.float32, device=dy.device)
    sizes = {"CHUNK": CHUNK, "ROWS": ROWS, "BLOCK": BLOCK, "num_warps": 4}
    if chunks > 1:
        _further_chunks[(chunks - 1, blocks)](dy, tokens, order, sums, count, width, **sizes)
    _add[(count, blocks)](main, dy, tokens, order, sums, count, width, **sizes)
