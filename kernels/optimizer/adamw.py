"""One AdamW step over a flat shard of parameters (arXiv 1711.05101, algorithm 2)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu
from pentad.kernels.optimizer.param_remainders import nearest


class Coefficients(NamedTuple):
    """What a step needs of its hyperparameters, computed in float64 on the host."""

    decay: float  # lr * weight_decay
    first: float  # 1 - beta1
    second: float  # 1 - beta2
    size: float  # lr / (1 - beta1^step)
    unbias: float  # 1 / sqrt(1 - beta2^step)
    eps: float


def coefficients(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Coefficients:
    """The coefficients of a step, counted from 1."""
    assert step >= 1, f"step is {step}: expected at least 1"
    return Coefficients(
        decay=lr * weight_decay,
        first=1 - beta1,
        second=1 - beta2,
        size=lr / (1 - beta1**step),
        unbias=1 / math.sqrt(1 - beta2**step),
        eps=eps,
    )


def _updated(master: Tensor, m: Tensor, v: Tensor, g: Tensor, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    m, v = m.to(master.dtype), v.to(master.dtype)
    new_m = m + (g - m) * c.first
    new_v = v + (g * g - v) * c.second
    step = c.size * new_m / (new_v.sqrt() * c.unbias + c.eps)
    return new_m, new_v, master - c.decay * master - step


@triton_on_gpu
def adamw_(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, out: Tensor | None, scale: Tensor, c: Coefficients
) -> None:
    """Updates master [n], m and v from grad [n] * scale, and writes the `nearest` of the new master to out [n].

    Gradients and master, which may be a SplitFloat32, are float32; m and v are too, or bfloat16, to which they are
    rounded after the update.

    As torch.optim.AdamW: decoupled weight decay, bias correction, eps outside the root. `scale` [1] is on the same
    device; if it is not finite nothing changes, which skips a step without the host.
    """
    finite = torch.isfinite(scale)
    new_m, new_v, new_master = _updated(master, m, v, grad.to(master.dtype) * scale.to(master.dtype), c)
    for tensor, new in ((m, new_m), (v, new_v), (master, new_master)):
        tensor.copy_(torch.where(finite, new.to(tensor.dtype), tensor))
    if out is not None:
        out.copy_(torch.where(finite, nearest(new_master, out.dtype), out))


@triton_on_gpu
def adamw_optimistic_(out: Tensor, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients) -> None:
    """Writes to out [n] what `adamw_` with a scale of 1 would, and changes nothing else.

    The step can still be cancelled, or taken with another scale (post-validation, arXiv 2401.10241, section 4).
    """
    out.copy_(nearest(_updated(master, m, v, grad.to(master.dtype), c)[2], out.dtype))
