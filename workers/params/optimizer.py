"""The end of a step on one rank: the global norm, clipping and AdamW."""

from __future__ import annotations

from typing import Any

import torch

from pentad.kernels.adamw import adamw_, adamw_ahead_
from pentad.schedules.spec.plan import OptimizerShape
from pentad.workers.params.buckets import Place
from pentad.workers.params.parameters import Parameters

ROW = 4096


def square_sum(parameters: Parameters, counted: list[Place]) -> torch.Tensor:
    """Sum of squares of parts of a shard of a stage's gradient, a float64 scalar.

    Rows are summed in the gradient's own precision: torch would make a float64 copy of all of it first.
    """
    norms = [torch.zeros(1, dtype=parameters.gradient.dtype, device=parameters.gradient.device)]
    for flat in (parameters.gradient[place] for place in counted):
        whole = flat.numel() // ROW * ROW
        rows = flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
        norms += [torch.linalg.vector_norm(part, dim=1) for part in rows]
    return torch.cat(norms).double().square().sum()


def clip(norm: torch.Tensor, limit: float, dtype: torch.dtype) -> torch.Tensor:
    """The factor [1] for all gradients from their global norm, a float64 scalar: min(1, limit / norm).

    It is nan when the norm is not finite: `adamw_` then changes nothing, and no host has to look.
    """
    factor = torch.where(torch.isfinite(norm), (limit / norm).clamp(max=1.0), torch.nan)
    return factor.to(dtype).view(1)


def step(parameters: Parameters, shape: OptimizerShape, number: int, scale: torch.Tensor) -> None:
    """AdamW step `number` (from 0) on one stage. Norms are not decayed."""
    for part, decay in _parts(parameters, shape):
        adamw_(
            parameters.master[part],
            parameters.m[part],
            parameters.v[part],
            parameters.gradient[part],
            parameters.compute[part] if parameters.compute is not parameters.master else None,
            scale=scale,
            **_rates(shape, number, decay),
        )


def step_ahead(parameters: Parameters, shape: OptimizerShape, number: int) -> None:
    """The compute weights as `step` would leave them with scale 1; nothing else changes."""
    assert parameters.compute is not parameters.master
    for part, decay in _parts(parameters, shape):
        adamw_ahead_(
            parameters.compute[part],
            parameters.master[part],
            parameters.m[part],
            parameters.v[part],
            parameters.gradient[part],
            **_rates(shape, number, decay),
        )


def _parts(parameters: Parameters, shape: OptimizerShape) -> list[tuple[Place, float]]:
    """What there is of norms and matrices, with their weight decay."""
    return [(place, shape.weight_decay if has_matrices else 0.0) for place, has_matrices in parameters.kinds]


def _rates(shape: OptimizerShape, number: int, decay: float) -> dict[str, Any]:
    return {
        "lr": shape.rate(number),
        "beta1": shape.beta1,
        "beta2": shape.beta2,
        "eps": shape.eps,
        "weight_decay": decay,
        "step": number + 1,
    }
