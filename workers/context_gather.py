"""Context parallelism by gathering: every rank gets all keys and values at once (arXiv 2407.21783, 3.3.2).

One message in place of a ring's many, and room for the keys and values of whole sequences while a layer is computed;
they are gathered again for the backward pass, so that none are kept in between.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.kernels.attention_block import Gradients
from pentad.kernels.dispatch import accumulator
from pentad.workers.context_parts import Given, Saved, disjoint, disjoint_backward, packed, unpacked
from pentad.workers.tensor_ranks import gather_all as _gather
from pentad.workers.tensor_ranks import scatter_sum as _scatter
from pentad.workers.turns import Coming, Turns


def forward(group: dist.ProcessGroup, given: Given) -> Turns[Saved]:
    """Attention of a rank's queries to the keys of all."""
    k, v = yield from _everything(group, given.k, given.v)
    return given.saved(*disjoint(given, k, v))


def backward(group: dist.ProcessGroup, saved: Saved, dout: torch.Tensor) -> Turns[Gradients]:
    """(dq, dk, dv) of what this rank gave to the forward pass."""
    k, v = saved.k, saved.v
    keys, values = yield from _everything(group, k, v)
    dq, *reached = disjoint_backward(saved, dout, keys, values)
    by_rank = torch.cat([_by_rank(x, group.size()).flatten(1) for x in reached], dim=1).to(accumulator(k.dtype))
    own = by_rank.new_empty(by_rank.shape[1])
    work = _scatter(own, by_rank.view(-1), group=group, async_op=True)
    dk, dv = unpacked((yield from Coming((work,), lambda: own, by_rank)), k, v)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _everything(group: dist.ProcessGroup, k: torch.Tensor, v: torch.Tensor) -> Coming[list[torch.Tensor]]:
    """Keys and values of whole sequences."""
    own = packed(k, v)
    by_rank = own.new_empty(group.size(), own.numel())
    work = _gather(by_rank.view(-1), own, group=group, async_op=True)
    return Coming((work,), lambda: [_in_order(x) for x in unpacked(by_rank, k, v)], own)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """[ranks, B, M, S / ranks, D], zigzag, as [B, M, S, D]."""
    first, second = x.unflatten(3, (2, -1)).unbind(3)
    chunks = torch.cat([first, second.flip(0)])
    return chunks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The inverse of `_in_order`."""
    chunks = x.unflatten(2, (2 * ranks, -1)).permute(2, 0, 1, 3, 4)
    return torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], dim=3).flatten(3, 4)
