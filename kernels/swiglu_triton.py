"""SwiGLU in Triton: a program takes one block of a row; neighbouring programs take neighbouring blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
PER_THREAD = 16


@triton.jit
def _forward(gate_up, y, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    blocks = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * I + columns, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, gate_up, dgate_up, y, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    blocks = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + row * I + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = d * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dgate_up + row * (2 * I) + columns, dgate.to(y.dtype.element_ty), mask=mask)
    tl.store(dgate_up + row * (2 * I) + I + columns, (d * silu).to(y.dtype.element_ty), mask=mask)
    tl.store(y + row * I + columns, (silu * up).to(y.dtype.element_ty), mask=mask)


def row_blocks(width: int) -> tuple[int, int, int]:
    """(columns of a program, programs of a row, warps of a program) for rows of `width` elements."""
    block = max(128, min(TILE, triton.next_power_of_2(width)))
    return block, triton.cdiv(width, block), max(1, block // (32 * PER_THREAD))


def swiglu(gate_up: Tensor) -> Tensor:
    """Launches the forward kernel; see `pentad.kernels.swiglu.swiglu`."""
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    block, blocks, warps = row_blocks(width)
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _forward[(tokens * blocks,)](gate_up, y, I=width, BLOCK=block, num_warps=warps)
    return y


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Launches the backward kernel; see `pentad.kernels.swiglu.swiglu_backward`."""
    assert gate_up.is_contiguous() and dy.is_contiguous() and gate_up.shape[1] == 2 * dy.shape[1]
    tokens, width = dy.shape
    block, blocks, warps = row_blocks(width)
    dgate_up = torch.empty_like(gate_up)
    y = torch.empty_like(dy)
    _backward[(tokens * blocks,)](dy, gate_up, dgate_up, y, I=width, BLOCK=block, num_warps=warps)
    return dgate_up, y
