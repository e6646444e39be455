"""What the optimizer does with every tensor: plain data, sent to the ranks with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from pentad.schedules.spec.learning_rate import LearningRate


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW with decoupled weight decay of matrices. Gradients whose global norm exceeds `clip_norm` are clipped to it;
    None: never."""

    learning_rate: LearningRate
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float | None
