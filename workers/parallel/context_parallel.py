"""Attention over the ranks of a cp group, each of which holds a part of every sequence (spec/cp_layout.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.kernels.attention.attention import SavedAttention, attention, attention_backward
from pentad.kernels.attention.attention_partial import Gradients
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.workers.parallel import cp_all_gather, cp_ring
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.parallel.cp_blocks import Step, plan
from pentad.workers.parallel.cp_parts import Given, Saved, part, part_backward
from pentad.workers.parallel.cp_ulysses import summed, to_heads, to_positions


class Exchanged(NamedTuple):
    """What B needs where whole sequences of some heads were computed: `kv_heads` are those of one rank before."""

    saved: SavedAttention | Saved
    kv_heads: int


VARIANTS = {"ring": cp_ring, "all_gather": cp_all_gather}
Kept = SavedAttention | Saved | Exchanged


class Documents(NamedTuple):
    """What a rank computes of a batch of packed rows: made once for all layers, forward and backward."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Context:
    """One rank's part in attention over a group, whose ranks stand in the order of their parts.

    All ranks of the group call `attend` and `attend_backward` in the same order. `scale` is what scores are multiplied
    by, 1 / sqrt(D) unless given.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    variant: CpMethod = "ring"
    scale: float | None = None

    def documents(
        self, rows: Sequence[Sequence[int]], length: int, device: torch.device | str = "cpu"
    ) -> Documents | None:
        """`rows[b]` are the positions, in the whole sequence of `length`, at which the documents of row b begin, the
        first one 0; nothing, where each row is one document. Costs one copy to the device and no wait for it."""
        if all(len(starts) == 1 for starts in rows):
            return None
        assert all(starts[0] == 0 and starts[-1] < length for starts in rows)
        slices = [(slice(b, b + 1), tuple(starts)) for b, starts in enumerate(rows)]
        return Documents(plan(self.variant, self.size, self.rank, length, slices, device))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None = None,
        deterministic: bool = False,
    ) -> Turns[tuple[torch.Tensor, Kept]]:
        """(out [B, N, S / cp, Dv], what B needs) of the rank's q [B, N, S / cp, D], k [B, M, S / cp, D] and
        v [B, M, S / cp, Dv], in the order of its positions. The inputs must stay unchanged until B."""
        group, steps = self.group, documents.steps if documents else None
        if group is None or self.size == 1:
            return self._whole(q, k, v, steps, deterministic)
        if self.variant == "ulysses":
            heads = yield from to_heads(group, q, k, v)
            out, saved = self._whole(heads[0], heads[1], heads[2], steps, deterministic)
            rows = yield from to_positions(group, out)
            return rows[0], Exchanged(saved, k.shape[1])
        steps = steps or _undivided(self.variant, self.size, self.rank, q.shape[2] * self.size)
        ran = yield from VARIANTS[self.variant].forward(group, Given(q, k, v, steps, self.scale, deterministic))
        return ran.out, ran

    def attend_backward(self, dout: torch.Tensor, kept: Kept) -> Turns[Gradients]:
        """(dq, dk, dv) of what the rank gave, from dout [B, N, S / cp, Dv]."""
        group = self.group
        if isinstance(kept, Exchanged):
            assert group is not None
            heads = yield from to_heads(group, dout)
            grads = yield from to_positions(group, *_whole_backward(heads[0], kept.saved))
            return grads[0], summed(grads[1], kept.kv_heads), summed(grads[2], kept.kv_heads)
        if group is None or isinstance(kept, SavedAttention):
            return _whole_backward(dout, kept)
        return (yield from VARIANTS[self.variant].backward(group, kept, dout))

    def _whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: tuple[Step, ...] | None, deterministic: bool
    ) -> tuple[torch.Tensor, SavedAttention | Saved]:
        """Of whole sequences, with no other rank."""
        if steps is None:
            return attention(q, k, v, deterministic, self.scale)
        given = Given(q, k, v, steps, self.scale, deterministic)
        saved = given.saved(*part(given, steps[0][0], k, v))
        return saved.out, saved


def _whole_backward(dout: torch.Tensor, saved: SavedAttention | Saved) -> Gradients:
    if isinstance(saved, SavedAttention):
        return attention_backward(dout, saved)
    return part_backward(saved, dout, saved.steps[0][0], saved.k, saved.v)


@lru_cache
def _undivided(variant: CpMethod, size: int, rank: int, length: int) -> tuple[Step, ...]:
    """What a rank computes of rows that are one document each."""
    return plan(variant, size, rank, length, [(slice(None), (0,))])
