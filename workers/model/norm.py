"""RMSNorm as part of a layer: what B needs of it, and what it leaves to W."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.workers.model.weight_grad import AddWgrad, Param


class SavedNorm(NamedTuple):
    input: Tensor  # [rows, D]
    rstd: Tensor  # [rows]


def norm(x: Tensor, param: Param, eps: float, residual: Tensor | None = None) -> tuple[Tensor, SavedNorm]:
    """(normed rows of x + residual [rows, D], what B needs)."""
    normed, *saved = rms_norm(x, param.weight, eps, residual)
    return normed, SavedNorm(*saved)


def norm_backward(
    dy: Tensor, param: Param, saved: SavedNorm, dresidual: Tensor | None = None
) -> tuple[Tensor, AddWgrad]:
    """(gradient [rows, D] of the input, plus `dresidual`, work for W) from the gradient of the normed rows."""
    dx, dweight = rms_norm_backward(dy, saved.input, param.weight, saved.rstd, dresidual)
    return dx, AddWgrad(param.gradient, dweight)
