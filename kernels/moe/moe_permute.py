"""Rows sorted by expert: which token each one is, and how rows and tokens become one another.

T tokens choose K of E experts each, of which `held` are here, from number `first` on. A token has a row for each of its
experts here, and there is room for as many rows R as there can be. Rows that are not needed stay at the end, undefined.
Nothing is added atomically, so two runs have the same bits, and on a GPU the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, runs_in_triton
from pentad.kernels.swiglu import swiglu_backward_reference


class ExpertRows(NamedTuple):
    """The rows of some tokens. An expert's rows are in the order of their tokens."""

    tokens: Tensor  # [R] int64
    weights: Tensor  # [R], of the rows' experts, float32 or float64
    positions: Tensor  # [T, K] int64, the row of each choice, -1 for an expert that is not here
    offsets: Tensor  # [held] int32, see grouped_gemm.py


def sort_by_expert(experts: Tensor, weights: Tensor, first: int, held: int) -> ExpertRows:
    """Sorts the choices [T, K] of tokens, without two of the same expert, and their weights [T, K]."""
    choices = experts.shape[1]
    local = experts - first
    here = (local >= 0) & (local < held)
    key, order = torch.where(here, local, held).to(torch.int32).flatten().sort(stable=True)
    numbers = torch.arange(held, dtype=torch.int32, device=key.device)
    offsets = torch.searchsorted(key, numbers, right=True, out_int32=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    chosen = order[: experts.shape[0] * min(choices, held)]
    positions = torch.where(here, rank.view_as(experts), -1)
    return ExpertRows(chosen // choices, weights.flatten()[chosen], positions, offsets)


def gather_rows(x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
    """[R, H]: the rows of x [T, H] with the numbers `tokens` [R], up to the last of the offsets."""
    if runs_in_triton(x):
        from pentad.kernels.moe import moe_permute_triton

        return moe_permute_triton.gather_rows(x, tokens, offsets)
    return x[tokens]


def sum_rows_reference(y: Tensor, positions: Tensor) -> Tensor:
    """The formula of `sum_rows` in torch operations, for any dtype and device."""
    total = torch.zeros(positions.shape[0], y.shape[1], dtype=accumulation_dtype(y.dtype), device=y.device)
    for position in positions.unbind(1):
        total += torch.where((position >= 0)[:, None], y[position.clamp(min=0)], 0)
    return total.to(y.dtype)


def sum_rows(y: Tensor, positions: Tensor) -> Tensor:
    """[T, H]: of each token the sum of its rows of y [R, H] at positions [T, K], from left to right; -1 is no row."""
    if runs_in_triton(y):
        from pentad.kernels.moe import moe_permute_triton

        return moe_permute_triton.sum_rows(y, positions)
    return sum_rows_reference(y, positions)


def weighted_swiglu_reference(gate_up: Tensor, weights: Tensor) -> Tensor:
    """The formula of `weighted_swiglu` in torch operations, for any dtype and device."""
    gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up * weights[:, None]).to(gate_up.dtype)


def weighted_swiglu(gate_up: Tensor, rows: ExpertRows) -> Tensor:
    """[R, I]: SwiGLU of gate_up [R, 2I] times the rows' weights."""
    if runs_in_triton(gate_up):
        from pentad.kernels.moe import moe_permute_triton

        return moe_permute_triton.weighted_swiglu(gate_up, rows.weights, rows.offsets)
    return weighted_swiglu_reference(gate_up, rows.weights)


def weighted_swiglu_backward_reference(dy: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formula of `weighted_swiglu_backward` in torch operations, for any dtype and device."""
    wide, weight = dy.to(weights.dtype), weights[:, None]
    dgate_up, y = swiglu_backward_reference(wide * weight, gate_up.to(weights.dtype))
    return dgate_up.to(dy.dtype), (y * weight).to(dy.dtype), (wide * y).sum(1)


def weighted_swiglu_backward(dy: Tensor, gate_up: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate_up [R, 2I], y [R, I], dweights [R]) from dy [R, I]; y is made again."""
    if runs_in_triton(dy):
        from pentad.kernels.moe import moe_permute_triton

        return moe_permute_triton.weighted_swiglu_backward(dy, gate_up, rows.weights, rows.offsets)
    return weighted_swiglu_backward_reference(dy, gate_up, rows.weights)
