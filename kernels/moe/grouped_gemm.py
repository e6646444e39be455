"""Grouped GEMM: rows sorted by expert times the matrix of their expert.

Of R rows, expert e of E has those from `offsets[e - 1]` (0 for the first) up to `offsets[e]`; offsets are int32 [E] on
the device of the rows. Rows from the last offset on are unused: they may contain anything, NaN too, and their results
are undefined. On a GPU the host never waits, except for float64.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from pentad.kernels.backend import runs_in_triton
from pentad.kernels.wgrad_gemm import accumulate_gradient_

ALIGNMENT = 16  # bytes, of the rows and matrices that torch's kernel supports


def grouped_gemm_reference(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_gemm` with one GEMM an expert, for any dtype and device."""
    y = x.new_empty(x.shape[0], weights.shape[1])
    for expert, (start, end) in enumerate(_spans(offsets)):
        torch.mm(x[start:end], weights[expert].t(), out=y[start:end])
    return y


def grouped_gemm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """[R, N]: each row of x [R, K] times the transpose of its expert's matrix in weights [E, N, K], of any strides.

    The gradient of x is `grouped_gemm` of the result's gradient with `weights.transpose(1, 2)`.
    """
    if not runs_in_triton(x):
        return grouped_gemm_reference(x, weights, offsets)
    if _torch_supports(x, weights):
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    from pentad.kernels.moe import grouped_gemm_triton

    return grouped_gemm_triton.grouped_gemm(x, weights, offsets)


def accumulate_grouped_gradient_reference_(main: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
    """`accumulate_grouped_gradient_` with one GEMM an expert, for any dtype and device."""
    for expert, (start, end) in enumerate(_spans(offsets)):
        accumulate_gradient_(main[expert], dy[start:end], x[start:end])


def accumulate_grouped_gradient_(main: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
    """main[e] [N, K] += dy_e^T @ x_e over the rows of each expert, of dy [R, N] and x [R, K].

    main [E, N, K] is float32, or float64 for float64 inputs. No product is rounded to 16
    bits, and rows are added in order.
    """
    if not runs_in_triton(dy):
        accumulate_grouped_gradient_reference_(main, dy, x, offsets)
        return
    from pentad.kernels.moe import grouped_gemm_triton

    grouped_gemm_triton.accumulate_grouped_gradient_(main, dy, x, offsets)


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    """(first, end) of each expert's rows; waits for the device."""
    return list(itertools.pairwise([0, *offsets.tolist()]))


def _torch_supports(x: Tensor, weights: Tensor) -> bool:
    """Whether torch has a kernel that reads the offsets on the device; else it would loop over them on the host."""
    divisible = all(width * x.element_size() % ALIGNMENT == 0 for width in weights.shape[1:])
    aligned = divisible and x.data_ptr() % ALIGNMENT == 0 and weights.data_ptr() % ALIGNMENT == 0
    return x.dtype == torch.bfloat16 and x.shape[0] > 0 and aligned and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
