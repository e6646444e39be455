"""SwiGLU of a packed projection (arXiv 2002.05202): silu(gate) * up, forward and backward."""

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, triton_on_gpu


@triton_on_gpu
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the rows of gate_up [T, 2I], contiguous; returns [T, I]."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@triton_on_gpu
def swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate_up [T, 2I], y [T, I]) from dy [T, I]; y is recomputed, so the forward need not save it."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    wide = dy.to(gate.dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = wide * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((dgate, wide * silu), dim=-1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)
