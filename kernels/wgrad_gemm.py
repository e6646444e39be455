"""The weight gradient of a linear layer, added to a wide accumulator in one GEMM."""

import torch
from torch import Tensor


def accumulate_gradient_(main: Tensor, dy: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
    """main [N, K] += dy [T, N]^T @ x [T, K]; with `overwrite`, = instead of +=. main is float32, or float64 for float64
    inputs.

    On a GPU, 16-bit inputs are multiplied and added in float32 throughout: no product is rounded to 16 bits.
    """
    left = dy.t()
    if main.dtype == dy.dtype:
        torch.mm(left, x, out=main) if overwrite else main.addmm_(left, x)
    elif main.is_cuda:
        wide = main.dtype
        torch.mm(left, x, wide, out=main) if overwrite else torch.addmm(main, left, x, out_dtype=wide, out=main)
    else:
        product = left.to(main.dtype) @ x.to(main.dtype)
        main.copy_(product) if overwrite else main.add_(product)
