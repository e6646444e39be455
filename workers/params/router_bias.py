"""Biases that even out how many tokens visit each expert, without a loss (arXiv 2408.15664)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


def moved_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """The bias [E] after a step whose microbatches and ranks have sent `load` [E] int64 tokens to each expert: up by
    `rate` for less than the mean, down for more (arXiv 2408.15664, algorithm 1). The comparison is one of integers, so
    it is the same however a step is cut."""
    return bias + rate * torch.sign(load.sum() - load.numel() * load).to(bias.dtype)


class Biases(NamedTuple):
    """Of experts, part of a stage's parameters: `values` [layers, E], whole and in the precision of master weights, for
    a step moves them by less than bfloat16 could tell."""

    layers: tuple[int, ...]
    values: torch.Tensor

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """[E] of each layer, by name."""
        return {f"layers.{layer}.experts.bias": row for layer, row in zip(self.layers, self.values, strict=True)}


class Balance:
    """Of one stage: the biases, which a step moves at this rate, and the visits of a step so far. `views` is what
    layers read and count in; `counted` are those of all ranks in a step that is over."""

    def __init__(self, biases: Biases, rate: float) -> None:
        self.bias, self.rate = biases.values, rate
        self.load = torch.zeros(self.bias.shape, dtype=torch.int64, device=self.bias.device)
        self.counted = torch.zeros_like(self.load)
        loads = zip(biases.layers, self.load, strict=True)
        self.views = biases.named | {f"layers.{layer}.experts.load": row for layer, row in loads}

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Adds up the visits of all ranks that hold the stage, and begins to count anew."""
        self.counted.copy_(self.load)
        self.load.zero_()
        if group is not None:
            dist.all_reduce(self.counted, group=group)

    def take(self, valid: torch.Tensor) -> None:
        """Moves the biases after a step that is `valid`, a scalar bool."""
        moved = torch.stack([moved_bias(*row, self.rate) for row in zip(self.bias, self.counted, strict=True)])
        self.bias.copy_(torch.where(valid, moved, self.bias))
