"""The optimizer step on one rank: the gradient norm, clipping and AdamW."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pentad.kernels.adamw import Coefficients, adamw_, adamw_optimistic_, coefficients
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.zero_layout import ShardIndex

ROW = 4096  # elements of a partial norm


def square_sum(parameters: Parameters, counted: list[ShardIndex]) -> torch.Tensor:
    """The sum of squares of these parts of a gradient shard, a float64 scalar.

    Rows are summed in the gradient's own precision: torch would first make a float64 copy of all of it.
    """
    norms = [torch.zeros(1, dtype=parameters.gradient.dtype, device=parameters.gradient.device)]
    for flat in (parameters.gradient[index] for index in counted):
        end = flat.numel() // ROW * ROW
        rows = flat[:end].view(-1, ROW), flat[end:].view(1, -1)
        norms += [torch.linalg.vector_norm(part, dim=1) for part in rows]
    return torch.cat(norms).double().square().sum()


def clip_scale(norm: torch.Tensor, limit: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The factor [1] that clips all gradients, from their global norm, a float64 scalar: min(1, limit / norm), or 1
    without a limit.

    NaN if the norm is not finite: `adamw_` then skips the step, and the host need not look.
    """
    factor = torch.ones_like(norm) if limit is None else (limit / norm).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.nan).to(dtype).view(1)


def step(parameters: Parameters, spec: OptimizerSpec, number: int, scale: torch.Tensor) -> None:
    """AdamW step `number` (from 0), with gradients times `scale` [1]."""
    has_copy = parameters.compute is not parameters.master
    for (master, m, v, gradient, compute), group in _groups(parameters, spec, number):
        adamw_(master, m, v, gradient, compute if has_copy else None, scale, group)


def optimistic_step(parameters: Parameters, spec: OptimizerSpec, number: int) -> None:
    """Writes the compute weights as `step` would with a scale of 1; nothing else changes."""
    assert parameters.compute is not parameters.master
    for (master, m, v, gradient, compute), group in _groups(parameters, spec, number):
        adamw_optimistic_(compute, master, m, v, gradient, group)


def _groups(
    parameters: Parameters, spec: OptimizerSpec, number: int
) -> Iterator[tuple[list[torch.Tensor], Coefficients]]:
    """([master, m, v, gradient, compute], coefficients) of every part. Weight decay applies to matrices only."""
    buffers = (parameters.master, parameters.m, parameters.v, parameters.gradient, parameters.compute)
    for index, is_matrix in parameters.decay_groups:
        weight_decay, learning_rate = spec.weight_decay if is_matrix else 0.0, spec.learning_rate.at(number)
        group = coefficients(learning_rate, spec.beta1, spec.beta2, spec.eps, weight_decay, step=number + 1)
        yield [buffer[index] for buffer in buffers], group
