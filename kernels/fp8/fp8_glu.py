"""Gated linear units that write their results only in 8 bits, never in 16."""

from __future__ import annotations

from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu
from pentad.kernels.fp8.fp8_cast import forms_of
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, absolute_maximum, quantize, record
from pentad.kernels.glu import Activation, glu, glu_backward


@triton_on_gpu
def fp8_glu(
    gate_up: Tensor,
    recipe: Recipe,
    act: Activation = "silu",
    amax: Tensor | None = None,
    maxima: Tensor | None = None,
) -> Fp8Tensor:
    """`glu` of gate_up [T, 2I] for products over I, scaled by the `amax` of its rows; its own maximum goes to `maxima`
    (see `record`)."""
    y = glu(_wide(gate_up), act)
    record(y, maxima)
    return quantize(y, recipe, "activation", amax)


@triton_on_gpu
def fp8_glu_backward(
    dy: Tensor,
    gate_up: Tensor,
    recipe: Recipe,
    act: Activation = "silu",
    amax: tuple[Amax, Tensor] | None = None,
    maxima: Tensor | None = None,
) -> tuple[Fp8Forms, Fp8Tensor]:
    """(both forms of dgate_up [T, 2I], the transposed one [I, T] of y) of `glu_backward`, scaled by the `amax` of
    dgate_up and of the columns of y; the absolute maximum of dgate_up goes to `maxima` (see `record`).

    Where tiles have scales, results are first rounded to the dtype of dy, in which kernels keep them in shared
    memory."""
    of_gradient, of_y = (None, None) if amax is None else amax
    dgate_up, y = glu_backward(dy, gate_up, act) if amax is None else glu_backward(_wide(dy), _wide(gate_up), act)
    record(dgate_up, maxima)
    return forms_of(dgate_up, recipe, "gradient", of_gradient), quantize(y.t(), recipe, "activation", of_y)


@triton_on_gpu
def glu_amax(gate_up: Tensor, act: Activation = "silu") -> Tensor:
    """The absolute maximum [1, 1] of `glu`, which is not written."""
    return absolute_maximum(glu(_wide(gate_up), act))


@triton_on_gpu
def glu_backward_amax(dy: Tensor, gate_up: Tensor, act: Activation = "silu") -> tuple[Tensor, Tensor]:
    """The absolute maxima [1, 1] of both results of `glu_backward`, which are not written."""
    dgate_up, y = glu_backward(_wide(dy), _wide(gate_up), act)
    return absolute_maximum(dgate_up), absolute_maximum(y)


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))
