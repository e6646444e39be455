"""Context parallelism by all-gathering keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

Computes the same blocks as a ring, with one large message instead of many small ones. The keys and values of full
sequences take up memory only while a layer is computed: B gathers them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from pentad.kernels.attention.attention_merge import merge_partials_
from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.backend import accumulation_dtype
from pentad.workers.parallel.async_ops import AsyncResult, Task
from pentad.workers.parallel.cp_blocks import Inputs, SavedBlocks, block_backward, block_forward, pack_kv, unpack_kv
from pentad.workers.parallel.document_mask import Block, Step
from pentad.workers.parallel.row_exchange import RowGroup

KV = tuple[Tensor, Tensor]  # keys and values, or their gradients


def forward(group: RowGroup, inputs: Inputs) -> Task[SavedBlocks]:
    """Attention of this rank's queries to the keys of all ranks."""
    q, k, v, steps, *_ = inputs
    in_flight = _gather_kv(group, k, v)
    out, lse = block_forward(inputs, steps[0][0], k, v)  # overlaps with the all-gather
    out = out.to(accumulation_dtype(q.dtype))
    kv_by_rank = yield from in_flight
    for at, source in _further_blocks(group, steps):
        partial = block_forward(inputs, at, *kv_by_rank[source])
        merge_partials_(out[:, :, at.queries], lse[:, :, at.queries], *partial)
    return SavedBlocks(inputs, out.to(q.dtype), lse)


def backward(group: RowGroup, saved: SavedBlocks, dout: Tensor) -> Task[QKVGrads]:
    """(dq, dk, dv) of this rank's inputs."""
    q, k, v, steps, *_ = saved.inputs
    wide = accumulation_dtype(q.dtype)
    in_flight = _gather_kv(group, k, v)
    dq, *own = block_backward(saved, dout, steps[0][0], k, v)
    dq = dq.to(wide)
    kv_by_rank = yield from in_flight
    packed = q.new_zeros(group.size, k.numel() + v.numel(), dtype=wide)
    dkv_by_rank = [unpack_kv(each, k, v) for each in packed]
    for total, gradient in zip(dkv_by_rank[group.rank], own, strict=True):
        total.copy_(gradient)
    for at, source in _further_blocks(group, steps):
        block_dq, *block_dkv = block_backward(saved, dout, at, *kv_by_rank[source])
        dq[:, :, at.queries] += block_dq
        for total, gradient in zip(dkv_by_rank[source], block_dkv, strict=True):
            total[:, :, at.keys] += gradient
    (reduced,) = yield from group.reduce_scatter(packed)
    dk, dv = unpack_kv(reduced, k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _gather_kv(group: RowGroup, k: Tensor, v: Tensor) -> AsyncResult[list[KV]]:
    """Keys and values of full sequences, by rank."""
    packed = group.all_gather(pack_kv(k, v)[None])
    return packed.then(lambda by_rank: [unpack_kv(each, k, v) for each in by_rank])


def _further_blocks(group: RowGroup, steps: Sequence[Step]) -> Iterator[tuple[Block, int]]:
    """All blocks but the first, each with the rank that owns its keys."""
    for number, blocks in enumerate((steps[0][1:], *steps[1:])):
        for at in blocks:
            yield at, (group.rank - number) % group.size
