"""Ring attention (arXiv 2310.01889): keys and values go round the ranks while each computes with those it has.

The next ones are under way during a computation, so a rank has room for two blocks of others and no more. On the way
back the gradients of keys and values travel behind them, summed in float32 or wider, and end where they belong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.kernels.attention.attention_partial import Gradients, merge_
from pentad.kernels.backend import accumulator
from pentad.workers.parallel.async_ops import AsyncResult, Turns
from pentad.workers.parallel.cp_parts import Given, Saved, packed, part, part_backward, unpacked


def forward(group: dist.ProcessGroup, given: Given) -> Turns[Saved]:
    """Attention of a rank's queries to the keys of all."""
    q, k, v, size = given.q, given.k, given.v, group.size()
    held = packed(k, v)
    rooms = [torch.empty_like(held) for _ in range(min(2, size - 1))]
    for number, blocks in enumerate(given.steps):
        last = number == size - 1
        coming = None if last else pass_on(group, held, rooms[number % 2])
        if number == 0:
            out, lse = part(given, blocks[0], k, v)
            out = out.to(accumulator(q.dtype))
        else:
            keys, values = unpacked(held, k, v)
            for at in blocks:
                merge_(out[at.rows, :, at.queries], lse[at.rows, :, at.queries], *part(given, at, keys, values))
        if coming:
            held = yield from coming
    return given.saved(out.to(q.dtype), lse)


def backward(group: dist.ProcessGroup, saved: Saved, dout: torch.Tensor) -> Turns[Gradients]:
    """(dq, dk, dv) of what this rank gave to the forward pass."""
    q, k, v, size = saved.q, saved.k, saved.v, group.size()
    wide = accumulator(q.dtype)
    held, keys, values = packed(k, v), k, v
    rooms = [torch.empty_like(held) for _ in range(min(2, size - 1))]
    sums = [torch.empty_like(held, dtype=wide) for _ in range(2)]
    dq = q.new_zeros(q.shape, dtype=wide)
    returning: AsyncResult[torch.Tensor] | None = None
    for number, blocks in enumerate(saved.steps):
        coming = None if number == size - 1 else pass_on(group, held, rooms[number % 2])
        parts = [(at, *part_backward(saved, dout, at, keys, values)) for at in blocks]
        if coming:
            yield
        # what the ranks before gave for these keys has come while this was computed
        total = returning.now() if returning else sums[1].zero_()
        dk, dv = unpacked(total, k, v)
        for at, more_dq, more_dk, more_dv in parts:
            dq[at.rows, :, at.queries] += more_dq
            dk[at.rows, :, at.keys] += more_dk
            dv[at.rows, :, at.keys] += more_dv
        if coming:
            held = coming.now()
            keys, values = unpacked(held, k, v)
        returning = pass_on(group, total, sums[number % 2])
    assert returning is not None
    dk, dv = unpacked((yield from returning), k, v)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def pass_on(group: dist.ProcessGroup, sent: torch.Tensor, room: torch.Tensor) -> AsyncResult[torch.Tensor]:
    """One step of the ring: what is sent to the next rank, while what comes from the one before gets the room.

    In one call of torch: when a generation ends between the parts of its batch_isend_irecv, NCCL's group stays open,
    and of all that this thread starts afterwards, in whatever generation, nothing ever begins.
    """
    size, rank, count = group.size(), group.rank(), sent.numel()
    to, source = ([count * (other == peer % size) for other in range(size)] for peer in (rank + 1, rank - 1))
    work = dist.all_to_all_single(room, sent, source, to, group=group, async_op=True)
    return AsyncResult((work,), lambda: room, sent)
