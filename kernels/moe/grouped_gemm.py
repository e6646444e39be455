"""Grouped GEMM: rows sorted by expert times the matrix of their expert.

Of R rows, expert e of E has those from `offsets[e - 1]` (0 for the first) up to `offsets[e]`; offsets are int32 [E] on
the device of the rows. Rows from the last offset on are unused: they may contain anything, NaN too, and their results
are undefined. On a GPU the host never waits, except for float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pentad.kernels.backend import DenseRows, Strided, triton_on_gpu
from pentad.kernels.wgrad_gemm import accumulate_gradient_


@triton_on_gpu
def grouped_gemm(x: DenseRows, weights: Strided, offsets: Tensor) -> Tensor:
    """[R, N]: each row of x [R, K] times the transpose of its expert's matrix in weights [E, N, K].

    The gradient of x is `grouped_gemm` of the result's gradient with `weights.transpose(1, 2)`.
    """
    y = x.new_empty(x.shape[0], weights.shape[1])
    for expert, (start, end) in enumerate(spans(offsets)):
        torch.mm(x[start:end], weights[expert].t(), out=y[start:end])
    return y


@triton_on_gpu
def accumulate_grouped_gradient_(
    main: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, overwrite: bool = False
) -> None:
    """main[e] [N, K] += dy_e^T @ x_e over the rows of each expert, of dy [R, N] and x [R, K]; with `overwrite`, =
    instead of +=.

    main [E, N, K] is float32, or float64 for float64 inputs. No product is rounded to 16 bits, and rows are added in
    order.
    """
    for expert, (start, end) in enumerate(spans(offsets)):
        if start < end:
            accumulate_gradient_(main[expert], dy[start:end], x[start:end], overwrite=overwrite)
        elif overwrite:
            main[expert].zero_()


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    """(first, end) of each expert's rows; waits for the device."""
    return list(itertools.pairwise([0, *offsets.tolist()]))
