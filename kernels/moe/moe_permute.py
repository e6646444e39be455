"""Token permutation of MoE layers: rows sorted by expert, and how tokens become rows and rows tokens.

T tokens choose K of E experts each; `local` experts from number `first` on are on this rank. A token has a row for each
of its local experts. R is the largest possible number of rows; unused ones are at the end, undefined. There are no
atomic additions, so two runs have the same bits, and on a GPU the host never waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu
from pentad.kernels.glu import Activation, glu, glu_backward


class ExpertRows(NamedTuple):
    """The rows of some tokens, sorted by expert and then by token."""

    tokens: Tensor  # [R] int64
    weights: Tensor  # [R], float32 or float64
    positions: Tensor  # [T, K] int64, the row of each choice, -1 if the expert is not local
    offsets: Tensor  # [local] int32, see grouped_gemm.py


@triton_on_gpu
def sort_by_expert(experts: Tensor, weights: Tensor, first: int, local: int) -> ExpertRows:
    """Sorts the chosen experts [T, K] of tokens, distinct for a token, with their weights [T, K]."""
    choices = experts.shape[1]
    index = experts - first
    is_local = (index >= 0) & (index < local)
    key, order = torch.where(is_local, index, local).to(torch.int32).flatten().sort(stable=True)
    numbers = torch.arange(local, dtype=torch.int32, device=key.device)
    offsets = torch.searchsorted(key, numbers, right=True, out_int32=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    chosen = order[: experts.shape[0] * min(choices, local)]
    positions = torch.where(is_local, rank.view_as(experts), -1)
    return ExpertRows(chosen // choices, weights.flatten()[chosen], positions, offsets)


@triton_on_gpu
def values_of_choices(values: Tensor, positions: Tensor) -> Tensor:
    """[T, K]: the value [R] of each choice's row, at positions [T, K]; 0 where the position is -1, for none."""
    return torch.where(positions >= 0, values[positions.clamp(min=0)], 0)


@triton_on_gpu
def gather_rows(x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
    """[R, H]: the rows `tokens` [R] of x [T, H], up to the last offset."""
    return x[tokens]


@triton_on_gpu
def sum_rows(y: Tensor, positions: Tensor) -> Tensor:
    """[T, H]: the sum of each token's rows of y [R, H], at positions [T, K], from left to right; -1 is no row."""
    total = torch.zeros(positions.shape[0], y.shape[1], dtype=accumulation_dtype(y.dtype), device=y.device)
    for position in positions.unbind(1):
        total += torch.where((position >= 0)[:, None], y[position.clamp(min=0)], 0)
    return total.to(y.dtype)


@triton_on_gpu
def weighted_glu(gate_up: Tensor, weights: Tensor, offsets: Tensor, act: Activation = "silu") -> Tensor:
    """[R, I]: the gated linear units (see `glu`) of gate_up [R, 2I], times the weights [R], up to the last offset."""
    return (glu(gate_up.to(weights.dtype), act) * weights[:, None]).to(gate_up.dtype)


@triton_on_gpu
def weighted_glu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor, act: Activation = "silu"
) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate_up [R, 2I], y [R, I], dweights [R]) from dy [R, I]; y is recomputed."""
    wide, weight = dy.to(weights.dtype), weights[:, None]
    dgate_up, y = glu_backward(wide * weight, gate_up.to(weights.dtype), act)
    return dgate_up.to(dy.dtype), (y * weight).to(dy.dtype), (wide * y).sum(1)
