"""The optimizer step on one rank: the gradient norm, clipping, AdamW and Muon."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pentad.kernels.optimizer import square_sum as squares
from pentad.kernels.optimizer.adamw import Coefficients, adamw_, adamw_optimistic_, coefficients
from pentad.kernels.optimizer.muon import (
    MuonCoefficients,
    muon_,
    muon_coefficients,
    muon_direction_,
    muon_optimistic_,
)
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.update_layout import Run


def square_sum(parameters: Parameters, counted: list[slice]) -> torch.Tensor:
    """The sum of squares of these parts of a gradient shard, a float64 scalar."""
    sums = [squares.square_sum(parameters.gradient[index]) for index in counted]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=parameters.gradient.device)


def clip_scale(norm: torch.Tensor, limit: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The factor [1] that clips all gradients, from their global norm, a float64 scalar: min(1, limit / norm), or 1
    without a limit.

    NaN if the norm is not finite: `adamw_` then skips the step, and the host need not check.
    """
    factor = torch.ones_like(norm) if limit is None else (limit / norm).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.nan).to(dtype).view(1)


def step(
    parameters: Parameters,
    spec: OptimizerSpec,
    number: int,
    scale: torch.Tensor,
    directions: torch.Tensor | None = None,
) -> None:
    """Step `number` (from 0), with gradients multiplied by `scale` [1]. Muon needs the orthogonalized `directions`."""
    for run in parameters.updates.runs:
        index = run.where
        master, m, gradient = parameters.master_weights(index), parameters.m[index], parameters.gradient[index]
        out = parameters.compute[index] if parameters.is_apart else None
        if parameters.host is not None:
            state = master, m, parameters.v[run.place]
            parameters.host.stream.run(state, _Update(gradient, out, scale, _adamw(spec, run, number)))
        elif run.rule.method == "adamw":
            adamw_(master, m, parameters.v[run.place], gradient, out, scale, _adamw(spec, run, number))
        else:
            assert directions is not None
            muon_(master, m, gradient, directions[run.place], out, scale, _muon(spec, run, number))


class _Update:
    """AdamW of successive pieces of a run, as they arrive on the device."""

    def __init__(self, gradient: torch.Tensor, out: torch.Tensor | None, scale: torch.Tensor, c: Coefficients) -> None:
        assert out is not None, "compute weights never share memory with master weights on the host"
        self.gradient, self.out, self.scale, self.coefficients, self.done = gradient, out, scale, c, 0

    def __call__(self, state: Sequence[torch.Tensor]) -> None:
        master, m, v = state
        index = slice(self.done, self.done + len(master))
        adamw_(master, m, v, self.gradient[index], self.out[index], self.scale, self.coefficients)
        self.done = index.stop


def optimistic_step(
    parameters: Parameters, spec: OptimizerSpec, number: int, directions: torch.Tensor | None = None
) -> None:
    """Writes the compute weights as `step` would with a scale of 1, and changes nothing else."""
    assert parameters.is_apart
    for run in parameters.updates.runs:
        buffers = parameters.compute, parameters.master, parameters.m
        compute, master, m = (buffer[run.where] for buffer in buffers)
        if run.rule.method == "adamw":
            v, gradient = parameters.v[run.place], parameters.gradient[run.where]
            adamw_optimistic_(compute, master, m, v, gradient, _adamw(spec, run, number))
        else:
            assert directions is not None
            muon_optimistic_(compute, master, directions[run.place], _muon(spec, run, number))


def muon_directions(parameters: Parameters, spec: OptimizerSpec, number: int, scale: torch.Tensor) -> torch.Tensor:
    """What step `number` will orthogonalize [num_muon], in the compute dtype, from gradients multiplied by `scale`
    [1]."""
    updates = parameters.updates
    found = parameters.compute.new_empty(updates.num_muon)
    for run in updates.runs:
        if run.rule.method == "muon":
            m, gradient = parameters.m[run.where], parameters.gradient[run.where]
            muon_direction_(found[run.place], m, gradient, scale, _muon(spec, run, number))
    return found


def _adamw(spec: OptimizerSpec, run: Run, number: int) -> Coefficients:
    rate = spec.learning_rate.at(number) * run.rule.learning_rate_scale
    updates = number + 1 + spec.moment_offset
    return coefficients(rate, spec.beta1, spec.beta2, spec.eps, run.rule.weight_decay, step=updates)


def _muon(spec: OptimizerSpec, run: Run, number: int) -> MuonCoefficients:
    rate = spec.learning_rate.at(number) * run.rule.learning_rate_scale
    return muon_coefficients(rate, spec.momentum, run.rule.weight_decay, run.adjustment, nesterov=spec.nesterov)
