"""The end of a step on one rank: the global norm, clipping and AdamW."""

from __future__ import annotations

import torch

from pentad.kernels.adamw import adamw_
from pentad.schedules.plan import OptimizerShape
from pentad.workers.parameters import Parameters


def square_sum(parameters: Parameters) -> torch.Tensor:
    """Sum of squares of a stage's gradient, a float64 scalar."""
    return torch.linalg.vector_norm(parameters.gradient, dtype=torch.float64) ** 2


def clip(norm: torch.Tensor, limit: float, dtype: torch.dtype) -> torch.Tensor:
    """The factor [1] for all gradients from their global norm, a float64 scalar: min(1, limit / norm).

    It is nan when the norm is not finite: `adamw_` then changes nothing, and no host has to look.
    """
    factor = torch.where(torch.isfinite(norm), (limit / norm).clamp(max=1.0), torch.nan)
    return factor.to(dtype).view(1)


def step(parameters: Parameters, shape: OptimizerShape, number: int, scale: torch.Tensor) -> None:
    """AdamW step `number` (from 0) on one stage, and zero gradients after it. Norms are not decayed."""
    matrices, norms = slice(0, parameters.decayed), slice(parameters.decayed, None)
    separate = parameters.compute is not parameters.master
    for part, decay in ((matrices, shape.weight_decay), (norms, 0.0)):
        adamw_(
            parameters.master[part],
            parameters.m[part],
            parameters.v[part],
            parameters.gradient[part],
            parameters.compute[part] if separate else None,
            lr=shape.rate(number),
            beta1=shape.beta1,
            beta2=shape.beta2,
            eps=shape.eps,
            weight_decay=decay,
            step=number + 1,
            scale=scale,
        )
    parameters.gradient.zero_()
