"""A rank's part of a microbatch with data-aware groups (schedules/search/hybrid_planner.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from pentad.schedules.spec.cp_layout import document_lengths
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.document_mask import DocumentMask, Packed, plan_packed_steps

PADDING_SLOT = -1  # the last slot, which collects losses of 0


class SharedSequence(NamedTuple):
    """A sequence of `length` tokens, including padding, in which documents begin at `starts`. It is shared in the
    zigzag layout by `ranks` of the pool, of which this one is `ranks[place]`. The length is 0 for a rank on its own."""

    ranks: tuple[int, ...]
    place: int
    length: int
    starts: tuple[int, ...]


class ContextShare(NamedTuple):
    """A rank's T tokens of a microbatch: its part of a sequence, then documents of its own with `local` tokens each,
    the last of which may be padding. The ranks of its ep group have `expert_tokens` each. `positions` [T] are positions
    in the documents; `slots` [T] say where each token's loss is summed: in the slot of the row it was drawn in, or
    PADDING_SLOT."""

    sequence: SharedSequence
    local: tuple[int, ...]
    expert_tokens: tuple[int, ...]
    positions: Tensor
    slots: Tensor

    def group(self, pool: dist.ProcessGroup | None) -> ContextParallelGroup:
        """The ranks of the pool that share the sequence."""
        ranks, place, length, _ = self.sequence
        shared = length // len(ranks)
        return ContextParallelGroup(pool, len(ranks), place, method="ring", ranks=ranks, passed=shared)

    @property
    def counted(self) -> Tensor:
        """[T] bool: whether a token belongs to a document."""
        return self.slots != PADDING_SLOT

    def document_mask(self, window: int) -> DocumentMask:
        """The mask for layers with this window (0: none)."""
        ranks, place, length, starts = self.sequence
        packed = Packed(len(ranks), place, [document_lengths(starts, length)], self.local)
        return plan_packed_steps(packed, self.positions.device, window)
