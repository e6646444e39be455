"""Reductions of gradients in bfloat16 through process groups, with sums in float32 (`precision.reduce`).

Every holder rounds its gradients to bfloat16, both those it adds itself and those it sends, and the terms are added in
float32 in the order of ranks. A sum thus depends neither on which rank adds it nor on how the terms travel: ZeRO's
shards, DualPipe's mirrors and peer copies get the same bits. NCCL and gloo would add in bfloat16 and in an order of
their own, so terms are exchanged instead of using their reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.spec.plan import ALIGNMENT, aligned_part
from pentad.schedules.spec.zero_layout import INBOX_ELEMENTS
from pentad.workers.parallel.async_ops import Arrival, ContinuedWork, all_gather
from pentad.workers.rank_waits import rank_waits


def reduce_scatter_bf16(
    part: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, *, accumulate: bool
) -> list[Arrival]:
    """Sums row `group.rank()` of `full` [ranks n] over the ranks, with terms rounded to bfloat16, and writes the sum to
    `part` [n] or, with `accumulate`, adds it. `part` may be that row."""
    terms = full.view(group.size(), -1)

    def exchanged(columns: slice) -> ContinuedWork:
        sent = terms[:, columns].to(torch.bfloat16, memory_format=torch.contiguous_format)
        return _exchange(sent, group, partial(_add, part[columns], accumulate=accumulate))

    return _in_chunks(part, INBOX_ELEMENTS // group.size(), exchanged)


def all_reduce_bf16(flat: torch.Tensor, group: dist.ProcessGroup) -> list[Arrival]:
    """Replaces `flat` [n] by its sum over the ranks, whose terms are rounded to bfloat16. The sum is rounded once more
    by the rank that adds it, so that all ranks have the same.

    On a CPU the sums are exchanged when the host waits: in the same order on all ranks, as reductions end at NORM in
    the order in which they began.
    """

    def exchanged(span: slice) -> ContinuedWork:
        piece, ranks = flat[span], group.size()
        sent = piece.new_zeros(ranks, aligned_part(piece.numel(), ranks), dtype=torch.bfloat16)
        sent.view(-1)[: piece.numel()].copy_(piece)
        return _exchange(sent, group, partial(_gather_sums, piece, sent[0], group))

    return _in_chunks(flat, INBOX_ELEMENTS, exchanged)


def chunks(size: int, most: int) -> Iterator[slice]:
    """Slices of `size` elements, of at most `most` elements each, rounded down to a multiple of ALIGNMENT."""
    step = max(ALIGNMENT, most // ALIGNMENT * ALIGNMENT)
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _in_chunks(out: torch.Tensor, most: int, exchanged: Callable[[slice], ContinuedWork]) -> list[Arrival]:
    """Exchanges all chunks. On a GPU they are enqueued one after the other, which bounds their memory; a CPU's host
    would have to wait between two, so there all of `out` is one chunk."""
    if not out.is_cuda:
        return [exchanged(slice(out.numel()))]
    for chunk in chunks(out.numel(), most):
        work = exchanged(chunk)
        work.wait()  # makes the current stream wait, not the host
        work.follow()
    return []


def _exchange(sent: torch.Tensor, group: dist.ProcessGroup, follow: Callable[[torch.Tensor], object]) -> ContinuedWork:
    """Sends row i of `sent` [ranks, n] to rank i, and passes on to `follow` what all ranks have for this one [ranks,
    n]."""
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return ContinuedWork(work, partial(follow, received), sent)


def _add(out: torch.Tensor, terms: torch.Tensor, *, accumulate: bool) -> None:
    """Sets out [n] to the float32 sum of the rows of terms [ranks, n] in order; with `accumulate`, adds the sum to
    `out`."""
    add_shards_(out, terms[0], terms[1:], 0, accumulate=accumulate)


def _gather_sums(flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, terms: torch.Tensor) -> None:
    """Adds this rank's `terms` [ranks, part] in `own` [part], and fills `flat` [n] with the sums of all ranks."""
    _add(own, terms, accumulate=False)
    with rank_waits.abandonable():
        all_gather(terms.view(-1), own, group=group)
    flat.copy_(terms.view(-1)[: flat.numel()])
