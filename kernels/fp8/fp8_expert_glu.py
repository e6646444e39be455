"""Gated linear units of experts that write their results only in 8 bits, never in 16: rows with scales of 1 x 128
tiles."""

from __future__ import annotations

from torch import Tensor

from pentad.kernels.backend import triton_on_gpu
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Recipe, quantize
from pentad.kernels.glu import Activation
from pentad.kernels.moe.moe_permute import weighted_glu, weighted_glu_backward


@triton_on_gpu
def fp8_weighted_glu(
    gate_up: Tensor, weights: Tensor, offsets: Tensor, recipe: Recipe, act: Activation = "silu"
) -> Fp8Tensor:
    """`weighted_glu` [R, I] of gate_up [R, 2I], up to the last offset."""
    return quantize(weighted_glu(gate_up.to(weights.dtype), weights, offsets, act), recipe, "activation")


@triton_on_gpu
def fp8_weighted_glu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor, recipe: Recipe, act: Activation = "silu"
) -> tuple[Fp8Tensor, Fp8Tensor, Tensor]:
    """(dgate_up [R, 2I], y [R, I], dweights [R]) of `weighted_glu_backward`, up to the last offset."""
    wide = weights.dtype
    dgate_up, y, dweights = weighted_glu_backward(dy.to(wide), gate_up.to(wide), weights, offsets, act)
    return quantize(dgate_up, recipe, "gradient"), quantize(y, recipe, "activation"), dweights
