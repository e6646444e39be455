"""Gated linear units of a packed projection (arXiv 2002.05202), forward and backward.

act(gate) * up, with act the `silu` of Llama or the `gelu_pytorch_tanh` of Gemma; `clamped_silu` is gpt-oss's
gate * sigmoid(1.702 gate) * (up + 1) with gate at most 7 and up within 7.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_silu"]
GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
CLAMP, CLAMPED_SLOPE = 7.0, 1.702


@triton_on_gpu
def glu(gate_up: Tensor, act: Activation = "silu") -> Tensor:
    """[T, I]: the first half of each row of gate_up [T, 2I], contiguous, activated, times the second half."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    activated, _ = activate(gate, act)
    return (activated * _factor(up, act)).to(gate_up.dtype)


@triton_on_gpu
def glu_backward(dy: Tensor, gate_up: Tensor, act: Activation = "silu") -> tuple[Tensor, Tensor]:
    """(dgate_up [T, 2I], y [T, I]) from dy [T, I]; y is recomputed, so the forward need not save it."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    wide, (activated, slope), factor = dy.to(gate.dtype), activate(gate, act), _factor(up, act)
    dup = wide * activated
    if act == "clamped_silu":
        dup = dup * (up.abs() <= CLAMP)
    return torch.cat((wide * factor * slope, dup), dim=-1).to(gate_up.dtype), (activated * factor).to(gate_up.dtype)


def activate(gate: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """(the activated gate, the slope of the activation)."""
    if act == "gelu_pytorch_tanh":
        tanh = torch.tanh(GELU_SCALE * (gate + GELU_CUBE * gate**3))
        inner = GELU_SCALE * (1 + 3 * GELU_CUBE * gate.square())
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh.square()) * inner
    if act == "silu":
        sigmoid = torch.sigmoid(gate)
        return gate * sigmoid, sigmoid + gate * sigmoid * (1 - sigmoid)
    clamped = gate.clamp(max=CLAMP)
    sigmoid = torch.sigmoid(CLAMPED_SLOPE * clamped)
    slope = sigmoid + CLAMPED_SLOPE * clamped * sigmoid * (1 - sigmoid)
    return clamped * sigmoid, slope * (gate <= CLAMP)


def _factor(up: Tensor, act: Activation) -> Tensor:
    return up.clamp(-CLAMP, CLAMP) + 1 if act == "clamped_silu" else up
