"""Newton-Schulz orthogonalization of matrices, the heart of Muon. Matrix products only, so it needs no kernel."""

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype

A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic iteration in torch.optim.Muon and Keller Jordan's post on Muon
STEPS = 5
EPS = 1e-7


def newton_schulz(x: Tensor) -> Tensor:
    """Matrices x [N, R, C] with the same singular vectors and singular values near 1 (0.7 to 1.2; less where they were
    tiny), in the dtype of x, like all products.

    A matrix of zeros stays zero.
    """
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=accumulation_dtype(x.dtype)).clamp(min=EPS)
    x = (x / norm).to(x.dtype)
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if is_tall else x
