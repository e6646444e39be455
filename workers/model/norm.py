"""RMSNorm as part of a layer: what B needs of it, and what it leaves to W."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.model.weight_grad import AddWgrad, Param, Params


class SavedNorm(NamedTuple):
    input: Tensor  # [rows, D]
    rstd: Tensor  # [rows]


class Norm(NamedTuple):
    """Multiplies normed rows by the weight + `offset`."""

    param: Param  # [D]
    eps: float
    offset: float

    @classmethod
    def bind(cls, params: Params, name: str, model: ModelSpec) -> Norm:
        return cls(params[name], model.norm_eps, model.norm_offset)

    @classmethod
    def bind_optional(cls, params: Params, name: str, model: ModelSpec) -> Norm | None:
        """None for a model without this norm."""
        return cls.bind(params, name, model) if name in params else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, SavedNorm]:
        """(normed rows of x + residual [rows, D], what B needs)."""
        normed, *saved = rms_norm(x, self.param.weight, self.eps, residual, self.offset)
        return normed, SavedNorm(*saved)

    def backward(self, dy: Tensor, saved: SavedNorm, dresidual: Tensor | None = None) -> tuple[Tensor, AddWgrad]:
        """(gradient [rows, D] of the input, plus `dresidual`, work for W) from the gradient of the normed rows."""
        dx, dweight = rms_norm_backward(dy, saved.input, self.param.weight, saved.rstd, dresidual, self.offset)
        return dx, AddWgrad(self.param.gradient, dweight)
