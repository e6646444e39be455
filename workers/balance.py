"""Biases that even out how many tokens visit each expert, without a loss (arXiv 2408.15664)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.schedules.plan import Plan
from pentad.workers.router import moved_bias


class Balance:
    """Of one stage: a bias for every expert of its layers, and the visits of a step so far, on every rank alike.

    Biases have the precision of master weights: a step moves them by less than bfloat16 could tell.
    """

    def __init__(self, plan: Plan, stage: int, device: torch.device) -> None:
        experts = plan.model.experts
        assert experts is not None
        self.rate = experts.bias_rate
        first, end = plan.layers[stage]
        more = plan.model.predicted if end == plan.model.layers else 0
        self.layers = [layer for layer in range(first, end + more) if layer >= experts.dense]
        wide = torch.float64 if plan.dtype == "float64" else torch.float32
        self.bias = torch.zeros(len(self.layers), experts.count, dtype=wide, device=device)
        self.load = torch.zeros(len(self.layers), experts.count, dtype=torch.int64, device=device)

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
