"""Context parallelism by exchange (DeepSpeed-Ulysses, arXiv 2309.14509): parts of the sequence for parts of the heads.

Between two exchanges a rank has whole sequences and 1 / cp of the heads. With fewer key-value heads than ranks each of
them goes to several ranks, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pentad.kernels.backend import accumulator
from pentad.workers.parallel.async_ops import AsyncResult


def to_heads(group: dist.ProcessGroup, *tensors: torch.Tensor) -> AsyncResult[list[torch.Tensor]]:
    """[B, heads, S / cp, D] each, as [B, heads / cp, S, D]: the same for fewer heads than ranks, 1 head."""
    size = group.size()
    sent = [_cut(x.repeat_interleave(max(1, size // x.shape[1]), dim=1), 1, size) for x in tensors]
    return _exchange(group, sent, lambda x: x.permute(1, 2, 0, 3, 4).flatten(2, 3))


def to_positions(group: dist.ProcessGroup, *tensors: torch.Tensor) -> AsyncResult[list[torch.Tensor]]:
    """The way back: [B, heads, S, D] each, as [B, cp heads, S / cp, D]."""
    sent = [_cut(x, 2, group.size()) for x in tensors]
    return _exchange(group, sent, lambda x: x.permute(1, 0, 2, 3, 4).flatten(1, 2))


def summed(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of `heads` that went to several ranks, from the one of what came there."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.to(accumulator(gradient.dtype)).unflatten(1, (heads, -1)).sum(2).to(gradient.dtype)


def _cut(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """[parts, ...], a part for each rank."""
    return torch.stack(x.chunk(parts, dim))


def _exchange(
    group: dist.ProcessGroup, sent: list[torch.Tensor], joined: Callable[[torch.Tensor], torch.Tensor]
) -> AsyncResult[list[torch.Tensor]]:
    """[cp, ...] each, of which every rank gets one, in one message a pair of ranks; `joined` are what came."""
    flat = torch.cat([x.flatten(1) for x in sent], dim=1)
    got = torch.empty_like(flat)
    work = dist.all_to_all_single(got.view(-1), flat.view(-1), group=group, async_op=True)
    shapes = [x.shape[1:] for x in sent]

    def made() -> list[torch.Tensor]:
        parts = got.split([shape.numel() for shape in shapes], dim=1)
        return [joined(part.unflatten(1, shape)) for part, shape in zip(parts, shapes, strict=True)]

    return AsyncResult((work,), made, flat)
