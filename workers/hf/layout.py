"""Rows of a rotary part: interleaved in the files of some families, half-split in pentad."""

from __future__ import annotations

import torch

from pentad.workers.hf.names import Rotary


def to_halves(matrix: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """The rows of `matrix` in pentad's order: of each head the first of all pairs, then the second of all."""
    if rotary is None:
        return matrix
    heads = matrix.unflatten(0, (rotary.heads, -1))
    turned = heads[:, -rotary.width :]
    return torch.cat([heads[:, : -rotary.width], turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(0, 1)


def to_pairs(matrix: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """The inverse of `to_halves`."""
    if rotary is None:
        return matrix
    heads = matrix.unflatten(0, (rotary.heads, -1))
    first, second = heads[:, -rotary.width :].chunk(2, dim=1)
    turned = torch.stack([first, second], dim=2).flatten(1, 2)
    return torch.cat([heads[:, : -rotary.width], turned], dim=1).flatten(0, 1)
