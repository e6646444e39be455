"""Context parallelism by gathering: every rank gets all keys and values at once (arXiv 2407.21783, 3.3.2).

The blocks are a ring's. One message in place of many, and room for the keys and values of whole sequences while a layer
is computed; they are gathered again for the backward pass, so that none are kept in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from pentad.kernels.attention.attention_partial import Gradients, merge_
from pentad.kernels.backend import accumulator
from pentad.workers.parallel.async_ops import AsyncResult, Turns
from pentad.workers.parallel.cp_blocks import Block, Step
from pentad.workers.parallel.cp_parts import Given, Saved, packed, part, part_backward, unpacked
from pentad.workers.parallel.tensor_parallel import gather_all as _gather
from pentad.workers.parallel.tensor_parallel import scatter_sum as _scatter

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, or what belongs to them


def forward(group: dist.ProcessGroup, given: Given) -> Turns[Saved]:
    """Attention of a rank's queries to the keys of all."""
    q, k, v = given.q, given.k, given.v
    coming = _everything(group, k, v)
    out, lse = part(given, given.steps[0][0], k, v)  # with its own ones, while those of others come
    out = out.to(accumulator(q.dtype))
    everything = yield from coming
    for at, source in _others(group, given.steps):
        merge_(out[at.rows, :, at.queries], lse[at.rows, :, at.queries], *part(given, at, *everything[source]))
    return given.saved(out.to(q.dtype), lse)


def backward(group: dist.ProcessGroup, saved: Saved, dout: torch.Tensor) -> Turns[Gradients]:
    """(dq, dk, dv) of what this rank gave to the forward pass."""
    q, k, v = saved.q, saved.k, saved.v
    wide = accumulator(q.dtype)
    coming = _everything(group, k, v)
    dq, *own = part_backward(saved, dout, saved.steps[0][0], k, v)
    dq = dq.to(wide)
    everything = yield from coming
    by_rank = q.new_zeros(group.size(), k.numel() + v.numel(), dtype=wide)
    sums = [unpacked(each, k, v) for each in by_rank]
    for total, more in zip(sums[group.rank()], own, strict=True):
        total.copy_(more)
    for at, source in _others(group, saved.steps):
        more_dq, *reached = part_backward(saved, dout, at, *everything[source])
        dq[at.rows, :, at.queries] += more_dq
        for total, more in zip(sums[source], reached, strict=True):
            total[at.rows, :, at.keys] += more
    mine = by_rank.new_empty(by_rank.shape[1])
    work = _scatter(mine, by_rank.view(-1), group=group, async_op=True)
    dk, dv = unpacked((yield from AsyncResult((work,), lambda: mine, by_rank)), k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _everything(group: dist.ProcessGroup, k: torch.Tensor, v: torch.Tensor) -> AsyncResult[list[Pair]]:
    """Keys and values of whole sequences, by rank."""
    own = packed(k, v)
    by_rank = own.new_empty(group.size(), own.numel())
    work = _gather(by_rank.view(-1), own, group=group, async_op=True)
    return AsyncResult((work,), lambda: [unpacked(each, k, v) for each in by_rank], own)


def _others(group: dist.ProcessGroup, steps: Sequence[Step]) -> Iterator[tuple[Block, int]]:
    """Blocks with keys of other ranks, and whose they are."""
    for number, blocks in enumerate(steps[1:], 1):
        for at in blocks:
            yield at, (group.rank() - number) % group.size()
