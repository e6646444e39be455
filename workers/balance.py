"""Biases that even out how many tokens visit each expert, without a loss (arXiv 2408.15664)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.schedules.plan import Plan
from pentad.workers.router import moved_bias


def balanced(plan: Plan, stage: int) -> list[int]:
    """The layers of a stage whose experts biases even out."""
    experts, (first, end) = plan.model.experts, plan.layers[stage]
    if experts is None or not plan.is_balanced(stage):
        return []
    more = plan.model.predicted if end == plan.model.layers else 0
    return [layer for layer in range(first, end + more) if layer >= experts.dense]


class Balance:
    """Of one stage: a `bias` [layers, E] for every expert of its layers, which is part of its parameters, and the
    visits of a step so far, on every rank alike."""

    def __init__(self, plan: Plan, stage: int, bias: torch.Tensor) -> None:
        experts = plan.model.experts
        assert experts is not None
        self.rate, self.layers, self.bias = experts.bias_rate, balanced(plan, stage), bias
        self.load = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)

    def biases(self) -> dict[str, torch.Tensor]:
        """[E] each, by name."""
        return {f"layers.{layer}.experts.bias": row for layer, row in zip(self.layers, self.bias, strict=True)}

    def views(self) -> dict[str, torch.Tensor]:
        """What layers read and count in."""
        loads = {f"layers.{layer}.experts.load": row for layer, row in zip(self.layers, self.load, strict=True)}
        return self.biases() | loads

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Adds up the visits of all ranks that hold the stage."""
        if group is not None:
            dist.all_reduce(self.load, group=group)

    def take(self, valid: torch.Tensor) -> None:
        """After a step that is `valid`, a scalar bool: moves the biases, and counts anew in any case."""
        moved = torch.stack([moved_bias(*row, self.rate) for row in zip(self.bias, self.load, strict=True)])
        self.bias.copy_(torch.where(valid, moved, self.bias))
        self.load.zero_()
