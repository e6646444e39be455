"""Muon's updates of a flat shard, before and after its matrices are orthogonalized (Keller Jordan's post on Muon)."""

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu
from pentad.kernels.optimizer.param_remainders import nearest


class MuonCoefficients(NamedTuple):
    """What a step needs of its hyperparameters, computed in float64 on the host."""

    decay: float  # lr * weight_decay
    first: float  # 1 - momentum
    blend: float  # momentum for Nesterov's, else 1
    size: float  # lr * adjustment of the matrix


def muon_coefficients(
    lr: float, momentum: float, weight_decay: float, adjustment: float, *, nesterov: bool
) -> MuonCoefficients:
    return MuonCoefficients(lr * weight_decay, 1 - momentum, momentum if nesterov else 1.0, lr * adjustment)


@triton_on_gpu
def muon_direction_(out: Tensor, momentum: Tensor, grad: Tensor, scale: Tensor, c: MuonCoefficients) -> None:
    """Writes to out [n], in its dtype, the direction that is to be orthogonalized: g + (b - g) * blend, for the new
    momentum b and the gradient g = grad [n] * scale [1]. Changes nothing else."""
    g = grad * scale
    out.copy_(g + (_new_momentum(momentum, g, c) - g) * c.blend)


@triton_on_gpu
def muon_(
    master: Tensor,
    momentum: Tensor,
    grad: Tensor,
    direction: Tensor,
    out: Tensor | None,
    scale: Tensor,
    c: MuonCoefficients,
) -> None:
    """Updates master [n] with the orthogonalized direction [n] and momentum [n] with grad [n] * scale [1], and writes
    the `nearest` of the new master, which may be a SplitFloat32, to out [n].

    As torch.optim.Muon: decoupled weight decay, at the learning rate before its adjustment. If `scale` is not finite
    nothing changes, which skips a step without the host.
    """
    finite = torch.isfinite(scale)
    new_master = _new_master(master, direction, c)
    for tensor, new in ((momentum, _new_momentum(momentum, grad * scale, c)), (master, new_master)):
        tensor.copy_(torch.where(finite, new.to(tensor.dtype), tensor))
    if out is not None:
        out.copy_(torch.where(finite, nearest(new_master, out.dtype), out))


@triton_on_gpu
def muon_optimistic_(out: Tensor, master: Tensor, direction: Tensor, c: MuonCoefficients) -> None:
    """Writes to out [n] what `muon_` makes of the master [n] with the orthogonalized direction [n]."""
    out.copy_(nearest(_new_master(master, direction, c), out.dtype))


def _new_master(master: Tensor, direction: Tensor, c: MuonCoefficients) -> Tensor:
    return master - c.decay * master - c.size * direction.to(master.dtype)


def _new_momentum(momentum: Tensor, g: Tensor, c: MuonCoefficients) -> Tensor:
    momentum = momentum.to(g.dtype)
    return momentum + (g - momentum) * c.first
