"""Ring attention (arXiv 2310.01889): keys and values go round the ranks while each computes with those it has.

The next ones are under way during a computation, so a rank has room for two blocks of others and no more. On the way
back the gradients of keys and values travel behind them, summed in float32 or wider, and end where they belong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.kernels.attention_block import Gradients, merge_
from pentad.kernels.dispatch import accumulator
from pentad.workers.context_parts import Given, Saved, packed, part, part_backward, unpacked
from pentad.workers.turns import Turns

KEYS, GRADIENTS = 0, 1  # tags, for gloo


class Transfer:
    """One step of the ring, under way: what is sent to the next rank, what comes from the one before."""

    def __init__(self, group: dist.ProcessGroup, sent: torch.Tensor, room: torch.Tensor, tag: int) -> None:
        size, rank, self.room = group.size(), group.rank(), room
        to, source = (rank + 1) % size, (rank - 1) % size
        both = [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=to),
            dist.P2POp(dist.irecv, room, group=group, tag=tag, group_peer=source),
        ]
        self.works = dist.batch_isend_irecv(both)

    def wait(self) -> torch.Tensor:
        """What has come; what was sent may be written over."""
        for work in self.works:
            work.wait()
        return self.room


def forward(group: dist.ProcessGroup, given: Given) -> Turns[Saved]:
    """Attention of a rank's queries to the keys of all."""
    q, k, v, size = given.q, given.k, given.v, group.size()
    held = packed(k, v)
    rooms = [torch.empty_like(held) for _ in range(min(2, size - 1))]
    for number, blocks in enumerate(given.steps):
        last = number == size - 1
        coming = None if last else Transfer(group, held, rooms[number % 2], KEYS)
        if number == 0:
            out, lse = part(given, blocks[0], k, v)
            out = out.to(accumulator(q.dtype))
        else:
            keys, values = unpacked(held, k, v)
            for at in blocks:
                merge_(out[at.rows, :, at.queries], lse[at.rows, :, at.queries], *part(given, at, keys, values))
        if coming:
            yield
            held = coming.wait()
    return given.saved(out.to(q.dtype), lse)


def backward(group: dist.ProcessGroup, saved: Saved, dout: torch.Tensor) -> Turns[Gradients]:
    """(dq, dk, dv) of what this rank gave to the forward pass."""
    q, k, v, size = saved.q, saved.k, saved.v, group.size()
    wide = accumulator(q.dtype)
    held, keys, values = packed(k, v), k, v
    rooms = [torch.empty_like(held) for _ in range(min(2, size - 1))]
    sums = [torch.empty_like(held, dtype=wide) for _ in range(2)]
    dq = q.new_zeros(q.shape, dtype=wide)
    returning: Transfer | None = None
    for number, blocks in enumerate(saved.steps):
        coming = None if number == size - 1 else Transfer(group, held, rooms[number % 2], KEYS)
        parts = [(at, *part_backward(saved, dout, at, keys, values)) for at in blocks]
        if coming:
            yield
        # what the ranks before gave for these keys has come while this was computed
        total = returning.wait() if returning else sums[1].zero_()
        dk, dv = unpacked(total, k, v)
        for at, more_dq, more_dk, more_dv in parts:
            dq[at.rows, :, at.queries] += more_dq
            dk[at.rows, :, at.keys] += more_dk
            dv[at.rows, :, at.keys] += more_dv
        if coming:
            held = coming.wait()
            keys, values = unpacked(held, k, v)
        returning = Transfer(group, total, sums[number % 2], GRADIENTS)
    assert returning is not None
    yield
    dk, dv = unpacked(returning.wait(), k, v)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
