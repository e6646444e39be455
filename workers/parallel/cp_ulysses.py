"""Context parallelism by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509): trades parts of the sequence for heads.

Between the two exchanges a rank has full sequences and 1 / cp of the heads. With fewer key-value heads than ranks, each
head goes to several ranks, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype
from pentad.workers.parallel.async_ops import AsyncResult
from pentad.workers.parallel.row_exchange import RowGroup


def to_heads(group: RowGroup, *tensors: Tensor) -> AsyncResult[list[Tensor]]:
    """Each of [B, heads, S / cp, D] becomes [B, max(1, heads / cp), S, D]."""
    size = group.size
    sent = [_split(x.repeat_interleave(max(1, size // x.shape[1]), dim=1), 1, size) for x in tensors]
    return _exchange(group, sent, lambda x: x.permute(1, 2, 0, 3, 4).flatten(2, 3))


def to_positions(group: RowGroup, *tensors: Tensor) -> AsyncResult[list[Tensor]]:
    """The inverse: each of [B, heads, S, D] becomes [B, cp heads, S / cp, D]."""
    sent = [_split(x, 2, group.size) for x in tensors]
    return _exchange(group, sent, lambda x: x.permute(1, 0, 2, 3, 4).flatten(1, 2))


def sum_repeated(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `heads` heads from that of their copies."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.to(accumulation_dtype(gradient.dtype)).unflatten(1, (heads, -1)).sum(2).to(gradient.dtype)


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """[parts, ...], one for each rank."""
    return torch.stack(x.chunk(parts, dim))


def _exchange(group: RowGroup, sent: list[Tensor], join: Callable[[Tensor], Tensor]) -> AsyncResult[list[Tensor]]:
    """All-to-all of tensors [cp, ...] in one message per pair of ranks; `join` is applied to each tensor received."""
    flat = torch.cat([x.flatten(1) for x in sent], dim=1)
    shapes = [x.shape[1:] for x in sent]

    def split(received: Tensor) -> list[Tensor]:
        parts = received.split([shape.numel() for shape in shapes], dim=1)
        return [join(part.unflatten(1, shape)) for part, shape in zip(parts, shapes, strict=True)]

    return group.all_to_all(flat).then(split)
