"""Gated linear units in Triton: a program takes one block of a row; neighbouring programs take neighbouring blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels import glu as reference
from pentad.kernels.backend import ceil_div
from pentad.kernels.glu import Activation

TILE = 2048
PER_THREAD = 16
GELU_SCALE = tl.constexpr(reference.GELU_SCALE)
GELU_CUBE = tl.constexpr(reference.GELU_CUBE)
CLAMP = tl.constexpr(reference.CLAMP)
CLAMPED_SLOPE = tl.constexpr(reference.CLAMPED_SLOPE)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """Computed as the square of a reciprocal root: `tl.sigmoid`, which handles denormal numbers, takes three times as
    many instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """(the activated gate, its slope, the factor it is multiplied by, that factor's slope)"""
    if ACT == "gelu_pytorch_tanh":
        tanh = 2.0 * sigmoid((gate + gate * GELU_CUBE * gate * gate) * (2.0 * GELU_SCALE)) - 1.0
        inner = (1.0 + gate * (3.0 * GELU_CUBE) * gate) * GELU_SCALE
        slope = 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * inner
        return 0.5 * gate * (1.0 + tanh), slope, up, 1.0
    elif ACT == "silu":
        share = sigmoid(gate)
        return gate * share, share + gate * share * (1.0 - share), up, 1.0
    else:
        clamped = tl.minimum(gate, CLAMP)
        share = sigmoid(clamped * CLAMPED_SLOPE)
        slope = share + clamped * CLAMPED_SLOPE * share * (1.0 - share)
        slope = tl.where(gate <= CLAMP, slope, 0.0)
        factor = tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1.0
        return clamped * share, slope, factor, tl.where(tl.abs(up) <= CLAMP, 1.0, 0.0)


@triton.jit
def _forward(gate_up, y, I: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    blocks = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
    activated, _, factor, _ = activate(gate, up, ACT)
    tl.store(y + row * I + columns, (activated * factor).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, gate_up, dgate_up, y, I: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    blocks = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + row * I + columns, mask=mask, other=0.0).to(tl.float32)
    activated, slope, factor, factor_slope = activate(gate, up, ACT)
    tl.store(dgate_up + row * (2 * I) + columns, (d * factor * slope).to(y.dtype.element_ty), mask=mask)
    tl.store(dgate_up + row * (2 * I) + I + columns, (d * activated * factor_slope).to(y.dtype.element_ty), mask=mask)
    tl.store(y + row * I + columns, (activated * factor).to(y.dtype.element_ty), mask=mask)


def row_blocks(width: int) -> tuple[int, int, int]:
    """(columns of a program, programs of a row, warps of a program) for rows of `width` elements."""
    block = max(128, min(TILE, triton.next_power_of_2(width)))
    return block, ceil_div(width, block), max(1, block // (32 * PER_THREAD))


def glu(gate_up: Tensor, act: Activation = "silu") -> Tensor:
    """Launches the forward kernel; see `pentad.kernels.glu.glu`."""
    assert gate_up.shape[1] % 2 == 0
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    block, blocks, warps = row_blocks(width)
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _forward[(tokens * blocks,)](gate_up, y, I=width, ACT=act, BLOCK=block, num_warps=warps)
    return y


def glu_backward(dy: Tensor, gate_up: Tensor, act: Activation = "silu") -> tuple[Tensor, Tensor]:
    """Launches the backward kernel; see `pentad.kernels.glu.glu_backward`."""
    assert gate_up.shape[1] == 2 * dy.shape[1]
    tokens, width = dy.shape
    block, blocks, warps = row_blocks(width)
    dgate_up = torch.empty_like(gate_up)
    y = torch.empty_like(dy)
    _backward[(tokens * blocks,)](dy, gate_up, dgate_up, y, I=width, ACT=act, BLOCK=block, num_warps=warps)
    return dgate_up, y
