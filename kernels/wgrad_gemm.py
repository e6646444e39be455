"""The weight gradient of a linear layer, added to a wide accumulator in one GEMM."""

import torch
from torch import Tensor


def accumulate_gradient_(main: Tensor, dy: Tensor, x: Tensor) -> None:
    """main [N, K] += dy [T, N]^T @ x [T, K]; main is float32, or float64 for float64 inputs.

    On a GPU, 16-bit inputs are multiplied and added in float32 throughout: no product is rounded to 16 bits.
    """
    if main.dtype == dy.dtype:
        main.addmm_(dy.t(), x)
    elif main.is_cuda:
        torch.addmm(main, dy.t(), x, out_dtype=main.dtype, out=main)
    else:
        main += dy.to(main.dtype).t() @ x.to(main.dtype)
