"""Ring attention (arXiv 2310.01889): keys and values travel around the ring while each rank computes with those it has.

The next ones are received during a computation, so a rank holds at most two sets from other ranks. In B their gradients
follow them around the ring, accumulated in float32 or wider, and end up on the rank that owns the keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_merge import merge_partials_
from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.backend import accumulation_dtype
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork, Task
from pentad.workers.parallel.cp_blocks import Inputs, SavedBlocks, block_backward, block_forward, pack_kv, unpack_kv
from pentad.workers.parallel.point_to_point import exchange
from pentad.workers.parallel.row_exchange import RowGroup


class Ring(NamedTuple):
    """The ranks of a group in the order in which keys and values visit them; this rank is `ranks[place]`."""

    group: RowGroup
    ranks: tuple[int, ...]
    place: int


def forward(ring: Ring, inputs: Inputs) -> Task[SavedBlocks]:
    """Attention of this rank's queries to its own keys and to those passed around the ring."""
    (q, own_k, own_v, steps, *_), size = inputs, len(ring.ranks)
    k, v = (x[:, :, : inputs.passed] for x in (own_k, own_v))
    packed = pack_kv(k, v)
    buffers = [torch.empty_like(packed) for _ in range(min(2, size - 1))]
    for number, blocks in enumerate(steps):
        in_flight = None if number == size - 1 else pass_on(ring, packed, buffers[number % 2])
        if number == 0:
            out, lse = block_forward(inputs, blocks[0], own_k, own_v)
            out = out.to(accumulation_dtype(q.dtype))
            blocks = blocks[1:]
        keys, values = unpack_kv(packed, k, v)
        for at in blocks:
            partial = block_forward(inputs, at, keys, values)
            merge_partials_(out[:, :, at.queries], lse[:, :, at.queries], *partial)
        if in_flight:
            packed = yield from in_flight
    return SavedBlocks(inputs, out.to(q.dtype), lse)


def backward(ring: Ring, saved: SavedBlocks, dout: Tensor) -> Task[QKVGrads]:
    """(dq, dk, dv) of this rank's inputs."""
    (q, keys, values, steps, *_), size = saved.inputs, len(ring.ranks)
    wide, passed = accumulation_dtype(q.dtype), saved.inputs.passed
    k, v = (x[:, :, :passed] for x in (keys, values))
    packed = pack_kv(k, v)
    buffers = [torch.empty_like(packed) for _ in range(min(2, size - 1))]
    sums = [torch.empty_like(packed, dtype=wide) for _ in range(2)]
    dq = q.new_zeros(q.shape, dtype=wide)
    sums_in_flight: AsyncResult[Tensor] | None = None
    others = list[Tensor]()
    for number, blocks in enumerate(steps):
        kv_in_flight = None if number == size - 1 else pass_on(ring, packed, buffers[number % 2])
        gradients = [(at, *block_backward(saved, dout, at, keys, values)) for at in blocks]
        if kv_in_flight:
            yield
        # The previous ranks' sums for these keys arrived while this rank computed its own.
        total = sums_in_flight.wait() if sums_in_flight else sums[1].zero_()
        dk, dv = unpack_kv(total, k, v)
        for at, block_dq, block_dk, block_dv in gradients:
            dq[:, :, at.queries] += block_dq
            dk[:, :, at.keys] += block_dk[:, :, :passed]
            dv[:, :, at.keys] += block_dv[:, :, :passed]
        if number == 0 and passed is not None:
            others = [x[:, :, passed:].clone() for x in gradients[0][2:]]  # of keys and values that stay here
        if kv_in_flight:
            packed = kv_in_flight.wait()
            keys, values = unpack_kv(packed, k, v)
        sums_in_flight = pass_on(ring, total, sums[number % 2])
    assert sums_in_flight is not None
    dk, dv = (x.to(q.dtype) for x in unpack_kv((yield from sums_in_flight), k, v))
    if others:
        dk, dv = (torch.cat(each, 2) for each in zip((dk, dv), others, strict=True))
    return dq.to(q.dtype), dk, dv


def pass_on(ring: Ring, sent: Tensor, buffer: Tensor) -> AsyncResult[Tensor]:
    """One step around the ring: sends to the next rank and receives into `buffer` from the previous one."""
    return ring.group.pass_on(sent, buffer, ring.ranks[(ring.place + 1) % len(ring.ranks)], ring.ranks[ring.place - 1])


def sum_over(ring: Ring, counts: Tensor) -> AsyncResult[Tensor]:
    """Sums integers [n] over the ring's ranks, each of which sends its own to all others at once."""
    group, own = ring.group.group, ring.ranks[ring.place]
    assert group is not None
    others = [rank for rank in ring.ranks if rank != own]
    received = counts.new_empty(len(others), len(counts))
    sends = [(counts, rank) for rank in others]
    work = exchange(group, sends, list(zip(received, others, strict=True)))
    return AsyncResult((LayerWork(work, group),), lambda: counts + received.sum(0), counts)
