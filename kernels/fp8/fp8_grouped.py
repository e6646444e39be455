"""Products of experts in 8 bits: rows sorted by expert times the matrix of their expert, with scales of blocks.

Offsets are those of `pentad.kernels.moe.grouped_gemm`; activations and gradients have a scale for each 1 x 128 values,
weights for each 128 x 128. With an `index`, row `index[r]` of an operand takes the place of row r: tokens need not be
copied for each of their experts.

Weight gradients are sums over rows. A scale for a tile of rows would depend on which tokens share it, and so on the
mesh, and would take a second cast. So W multiplies the operands of F and B, cast back to the compute dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu
from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor
from pentad.kernels.moe.grouped_gemm import spans


class ExpertMatrices(NamedTuple):
    """The matrices [E, N, K] of experts: `rows` for products over K, `columns` [E, K, N] for products over N."""

    rows: Fp8Tensor
    columns: Fp8Tensor

    @classmethod
    def of(cls, forms: Fp8Forms, experts: int) -> ExpertMatrices:
        """From the forms of a matrix [E N, K]."""
        rows, columns = forms
        assert rows is not None and columns is not None
        return cls(
            Fp8Tensor(*(each.unflatten(0, (experts, -1)) for each in rows)),
            Fp8Tensor(*(each.unflatten(1, (experts, -1)).transpose(0, 1) for each in columns)),
        )


@triton_on_gpu
def fp8_grouped_gemm(
    x: Fp8Tensor, weights: Fp8Tensor, offsets: Tensor, dtype: torch.dtype, index: Tensor | None = None
) -> Tensor:
    """[R, N] of `dtype`: rows of x [.., K] times the transpose of their expert's matrix in weights [E, N, K]."""
    wide, rows = accumulation_dtype(dtype), _indexed(x, index)
    y = torch.empty(rows.values.shape[0], weights.values.shape[1], dtype=dtype, device=offsets.device)
    for expert, (start, end) in enumerate(spans(offsets)):
        if start < end:
            matrix = Fp8Tensor(*(each[expert] for each in weights)).dequantize(wide)
            y[start:end] = (Fp8Tensor(*(each[start:end] for each in rows)).dequantize(wide) @ matrix.t()).to(dtype)
    return y


@triton_on_gpu
def dequantize_rows(x: Fp8Tensor, offsets: Tensor, dtype: torch.dtype, index: Tensor | None = None) -> Tensor:
    """[R, K] of `dtype`: rows of x [.., K] times their scales; those from the last offset on are undefined."""
    return _indexed(x, index).dequantize(accumulation_dtype(dtype)).to(dtype)


def _indexed(x: Fp8Tensor, index: Tensor | None) -> Fp8Tensor:
    return x if index is None else Fp8Tensor(x.values.view(torch.uint8)[index].view(x.values.dtype), x.scales[index])
