"""Biases that even out how many tokens visit each expert, without a loss (arXiv 2408.15664)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.schedules.plan import Plan
from pentad.workers.router import moved_bias


def balanced(plan: Plan, stage: int) -> list[int]:
    """Layers of a stage whose experts are evened out by biases."""
    experts, (first, end) = plan.model.experts, plan.layers[stage]
    if experts is None or not plan.is_balanced(stage):
        return []
    more = plan.model.predicted if end == plan.model.layers else 0
    return [layer for layer in range(first, end + more) if layer >= experts.dense]


def named(plan: Plan, stage: int, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Layer by layer, [E] each, by name; nothing where there are none."""
    rows = () if bias is None else zip(balanced(plan, stage), bias, strict=True)
    return {f"layers.{layer}.experts.bias": row for layer, row in rows}


class Balance:
    """Of one stage: a `bias` [layers, E] for every expert of its layers, which is part of its parameters, and the
    visits of a step so far, on every rank alike. `views` is what layers read and count in."""

    def __init__(self, plan: Plan, stage: int, bias: torch.Tensor) -> None:
        experts = plan.model.experts
        assert experts is not None
        self.rate, self.bias = experts.bias_rate, bias
        self.load = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        loads = zip(balanced(plan, stage), self.load, strict=True)
        self.views = named(plan, stage, bias) | {f"layers.{layer}.experts.load": row for layer, row in loads}

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Adds up the visits of all ranks that hold the stage."""
        if group is not None:
            dist.all_reduce(self.load, group=group)

    def take(self, valid: torch.Tensor) -> None:
        """After a step that is `valid`, a scalar bool: moves the biases, and counts anew in any case."""
        moved = torch.stack([moved_bias(*row, self.rate) for row in zip(self.bias, self.load, strict=True)])
        self.bias.copy_(torch.where(valid, moved, self.bias))
        self.load.zero_()
