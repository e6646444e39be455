"""SwiGLU of a packed projection (arXiv 2002.05202): silu(gate) * up, forward and backward."""

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype, runs_in_triton


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` in torch operations, for any dtype and device."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def swiglu_backward_reference(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward` in torch operations, for any dtype and device."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    wide = dy.to(gate.dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = wide * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((dgate, wide * silu), dim=-1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the rows of gate_up [T, 2I], contiguous; returns [T, I]."""
    if runs_in_triton(gate_up):
        from pentad.kernels import swiglu_triton

        return swiglu_triton.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate_up [T, 2I], y [T, I]) from dy [T, I]; y is recomputed, so the forward need not save it."""
    if runs_in_triton(dy):
        from pentad.kernels import swiglu_triton

        return swiglu_triton.swiglu_backward(dy, gate_up)
    return swiglu_backward_reference(dy, gate_up)
