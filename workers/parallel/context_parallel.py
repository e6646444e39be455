"""Context parallelism: attention across ranks that each hold a part of every sequence (schedules/spec/cp_layout.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.kernels.attention.attention import SavedAttention, attention, attention_backward, causal_options
from pentad.kernels.attention.attention_partial import QKVGrads
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.attention.attention_sinks import add_sinks, sinks_backward
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.workers.parallel import cp_all_gather, cp_ring
from pentad.workers.parallel.async_ops import AsyncResult, Task
from pentad.workers.parallel.cp_blocks import Inputs, SavedBlocks, block_backward, block_forward
from pentad.workers.parallel.cp_ulysses import sum_repeated, to_heads, to_positions
from pentad.workers.parallel.document_mask import EVERY, Block, DocumentMask, plan_steps
from pentad.workers.parallel.row_exchange import RowGroup
from pentad.workers.parallel.row_split import RowSplit


class SavedUlysses(NamedTuple):
    """What B needs of full sequences of some heads; `kv_heads` is a rank's number before the exchange."""

    saved: SavedAttention | SavedBlocks
    kv_heads: int


class KeptAttention(NamedTuple):
    """The result of an attention, from which `attend` rebuilds what B needs without recomputing it."""

    out: Tensor  # [B, N, S, Dv], before the exchange of Ulysses
    lse: Tensor  # [B, N, S]


class KeptInputs(NamedTuple):
    """The inputs of an attention, from which `attend_again` computes the rest of what B needs."""

    q: Tensor  # [B, N, S, D], after the exchange of Ulysses
    k: Tensor  # [B, M, S, D]
    v: Tensor  # [B, M, S, Dv]
    kv_heads: int  # a rank's, before the exchange


SavedContext = SavedAttention | SavedBlocks | SavedUlysses


@dataclass(frozen=True)
class ContextParallelGroup(RowGroup):
    """The ranks that share sequences with this one. All of them call `attend` and `attend_backward` in the same order.

    These are all `size` ranks of `group`, and this one has number `rank`; or, for a ring, the `size` ranks of it listed
    in `ranks`, numbered in that order. In a ring only the first `passed` positions of each rank are shared; later ones
    are attended to on their own rank only.
    """

    method: CpMethod = "ring"
    ranks: tuple[int, ...] | None = None
    passed: int | None = None

    def document_mask(
        self, rows: Sequence[Sequence[int]], length: int, device: torch.device | str = "cpu", window: int = 0
    ) -> DocumentMask | None:
        """The mask for rows of `length` tokens (of the full sequence) in which documents begin at positions `rows[b]`,
        the first at 0; None if every row is one document. A token sees the last `window` tokens, or all of them (0).
        Copies to the device without waiting."""
        if all(len(starts) == 1 for starts in rows):
            return None
        assert all(starts[0] == 0 and starts[-1] < length for starts in rows)
        return plan_steps(self.method, self.size, self.rank, length, rows, device, window)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        documents: DocumentMask | None = None,
        sinks: Tensor | None = None,
        kept: KeptAttention | None = None,
    ) -> Task[tuple[Tensor, SavedContext]]:
        """(out [B, N, S / cp, Dv], what B needs) of this rank's q [B, N, S / cp, D], k [B, M, S / cp, D] and v [B, M, S
        / cp, Dv], in the order of its positions, and sinks [N]. The inputs must stay unchanged until B. `options` are
        those of full sequences; `documents` must have the same window. Given the `kept` result of the same inputs, only
        the exchanges that it needs are repeated."""
        if self.group is None or self.size == 1:
            return _attend_local(q, k, v, options, documents, sinks, kept)
        if self.method == "ulysses":
            heads = yield from to_heads(self, q, k, v)
            inputs_of_heads = KeptInputs(heads[0], heads[1], heads[2], k.shape[1])
            return (yield from self._attend_heads(inputs_of_heads, options, documents, sinks, kept))
        rows, length = q.shape[0], q.shape[2] * self.size
        window = 0 if options.window_left is None else options.window_left + 1
        steps = documents or _steps_without_mask(self.method, self.size, self.rank, rows, length, q.device, window)
        inputs = Inputs(q, k, v, steps, options, self.passed)
        if kept is not None:
            return kept.out, SavedBlocks(inputs, *kept)
        if self.method == "ring":
            blocks = yield from cp_ring.forward(self._ring, inputs)
        else:
            blocks = yield from cp_all_gather.forward(self, inputs)
        blocks = _with_sinks(blocks, sinks)
        return blocks.out, blocks

    def attend_again(
        self,
        inputs: KeptInputs,
        options: AttentionOptions,
        documents: DocumentMask | None = None,
        sinks: Tensor | None = None,
        kept: KeptAttention | None = None,
    ) -> Task[tuple[Tensor, SavedContext]]:
        """What `attend` returned, bit for bit, from the inputs kept of it."""
        if self.group is not None and self.size > 1 and self.method == "ulysses":
            return (yield from self._attend_heads(inputs, options, documents, sinks, kept))
        return (yield from self.attend(inputs.q, inputs.k, inputs.v, options, documents, sinks, kept))

    def join_inputs(
        self, first: Sequence[Tensor], rest: Sequence[Tensor], split: RowSplit, length: int
    ) -> Task[KeptInputs]:
        """The inputs after the exchange of Ulysses, whose first rows were kept (see `inputs_by_token`); of the `rest`,
        this rank has its own rows [T, heads, D] before the exchange. Sequences have `length` positions on each rank."""
        exchanged = yield from to_heads(self, *(each.transpose(0, 1)[None] for each in rest))
        pairs = zip(first, exchanged, strict=True)
        tokens = (split.join(kept, each[0].transpose(0, 1)) for kept, each in pairs)  # [cp T, heads, D]
        parts = (each.unflatten(0, (self.size, -1, length)).permute(1, 3, 0, 2, 4) for each in tokens)
        q, k, v = (each.flatten(2, 3).contiguous() for each in parts)
        return KeptInputs(q, k, v, rest[1].shape[1])

    def _attend_heads(
        self,
        inputs: KeptInputs,
        options: AttentionOptions,
        documents: DocumentMask | None,
        sinks: Tensor | None,
        kept: KeptAttention | None,
    ) -> Task[tuple[Tensor, SavedUlysses]]:
        """Attention over full sequences of some heads; the result goes back to the ranks of its positions."""
        q, k, v, kv_heads = inputs
        out, saved = _attend_local(q, k, v, options, documents, self._own_heads(sinks), kept)
        positions = yield from to_positions(self, out)
        return positions[0], SavedUlysses(saved, kv_heads)

    def attend_backward(
        self, dout: Tensor, saved: SavedContext, sinks: Tensor | None = None
    ) -> Task[tuple[QKVGrads, Tensor | None]]:
        """((dq, dk, dv) of this rank's inputs, its part of the gradient [N] of the sinks) from dout [B, N, S / cp, Dv]
        and the sinks of the forward."""
        if isinstance(saved, SavedUlysses):
            heads = yield from to_heads(self, dout)
            dsinks = _sinks_grad(heads[0], saved.saved, self._own_heads(sinks))
            if dsinks is not None:  # only this rank's heads
                before, after = self.rank * len(dsinks), (self.size - 1 - self.rank) * len(dsinks)
                dsinks = F.pad(dsinks, (before, after))
            dq, dk, dv = yield from to_positions(self, *_attend_local_backward(heads[0], saved.saved))
            return (dq, sum_repeated(dk, saved.kv_heads), sum_repeated(dv, saved.kv_heads)), dsinks
        dsinks = _sinks_grad(dout, saved, sinks)
        if self.group is None or self.size == 1 or isinstance(saved, SavedAttention):
            return _attend_local_backward(dout, saved), dsinks
        if self.method == "ring":
            return (yield from cp_ring.backward(self._ring, saved, dout)), dsinks
        return (yield from cp_all_gather.backward(self, saved, dout)), dsinks

    def sum(self, counts: Tensor) -> AsyncResult[Tensor]:
        """Sums integers [n] over the ranks."""
        return super().sum(counts) if self.ranks is None else cp_ring.sum_over(self._ring, counts)

    @property
    def _ring(self) -> cp_ring.Ring:
        return cp_ring.Ring(self, self.ranks or tuple(range(self.size)), self.rank)

    def _own_heads(self, sinks: Tensor | None) -> Tensor | None:
        """The sinks of the heads that this rank has after the exchange of Ulysses."""
        return None if sinks is None else sinks.chunk(self.size)[self.rank]


def keep(saved: SavedContext) -> KeptAttention | None:
    """The result of `attend`; None if B needs an autograd graph, and so the attention itself again."""
    inner = saved.saved if isinstance(saved, SavedUlysses) else saved
    return None if inner.lse is None else KeptAttention(inner.out, inner.lse)


def keep_inputs(saved: SavedContext) -> KeptInputs:
    """The part of what `attend` saved that `attend_again` needs."""
    inner, kv_heads = (saved.saved, saved.kv_heads) if isinstance(saved, SavedUlysses) else (saved, 0)
    q, k, v = inner.inputs[:3]
    return KeptInputs(q, k, v, kv_heads)


def inputs_by_token(saved: SavedContext, tokens: int) -> list[Tensor]:
    """Queries, keys and values [T, heads, D] of the slice with so many tokens; after the exchange of Ulysses, those of
    all ranks, rank by rank."""
    inputs = keep_inputs(saved)
    rows, length = inputs.q.shape[0], inputs.q.shape[2]
    parts = rows * length // tokens
    return [x[:, :, -length:].unflatten(2, (parts, -1)).permute(2, 0, 3, 1, 4).flatten(0, 2) for x in inputs[:3]]


def _with_sinks(saved: SavedBlocks, sinks: Tensor | None) -> SavedBlocks:
    if sinks is None:
        return saved
    return SavedBlocks(saved.inputs, *add_sinks(saved.out, saved.lse, sinks))


def _sinks_grad(dout: Tensor, saved: SavedAttention | SavedBlocks, sinks: Tensor | None) -> Tensor | None:
    if isinstance(saved, SavedAttention) or sinks is None:
        return None
    return sinks_backward(dout, saved.out, saved.lse, sinks)


def _attend_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    steps: DocumentMask | None,
    sinks: Tensor | None,
    kept: KeptAttention | None,
) -> tuple[Tensor, SavedAttention | SavedBlocks]:
    """Attention over full sequences, without communication."""
    if steps is None and options.window_left is None and not options.softcap and sinks is None:
        if kept is None:
            return attention(q, k, v, options.deterministic, options.scale)
        return kept.out, SavedAttention(*kept, (q, k, v), causal_options(q, options.deterministic, options.scale))
    at = steps[0][0] if steps else Block(EVERY, EVERY, True, window_left=options.window_left)
    inputs = Inputs(q, k, v, ((at,),), options)
    if kept is not None:
        return kept.out, SavedBlocks(inputs, *kept)
    saved = _with_sinks(SavedBlocks(inputs, *block_forward(inputs, at, k, v)), sinks)
    return saved.out, saved


def _attend_local_backward(dout: Tensor, saved: SavedAttention | SavedBlocks) -> QKVGrads:
    if isinstance(saved, SavedAttention):
        return attention_backward(dout, saved)
    _, k, v, steps, *_ = saved.inputs
    return block_backward(saved, dout, steps[0][0], k, v)


@lru_cache
def _steps_without_mask(
    method: CpMethod, size: int, rank: int, rows: int, length: int, device: torch.device, window: int
) -> DocumentMask:
    """The blocks for rows that are one document each."""
    return plan_steps(method, size, rank, length, [(0,)] * rows, device, window)
