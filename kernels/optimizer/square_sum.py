"""The sum of the squares of gradients, from which the global norm is computed."""

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu

PIECE = 2**20  # elements of which there is a float64 copy at a time


@triton_on_gpu
def square_sum(flat: Tensor) -> Tensor:
    """The sum of the squares of flat [n], a float64 scalar.

    Squares of float32 numbers are exact in float64. However gradients are divided into calls, the norm is the same to
    1e-15, and so are its float32 digits.
    """
    sums = [piece.double().square().sum() for piece in flat.split(PIECE)]
    return torch.stack(sums).sum()
