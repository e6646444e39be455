"""Token permutation in Triton: a program takes a row or a token; programs of unused rows return at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate, row_blocks


@triton.jit
def _gather(x, tokens, offsets, y, H, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + EXPERTS - 1):
        return
    token = tl.load(tokens + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    tl.store(y + row * H + columns, tl.load(x + token * H + columns, mask=mask), mask=mask)


@triton.jit
def _sum(y, positions, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(positions + token * K + choice)
        total += tl.load(y + row * H + columns, mask=mask & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_glu(
    gate_up, weights, offsets, y, I, EXPERTS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E741
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + EXPERTS - 1):
        return
    weight = tl.load(weights + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
    activated, _, factor, _ = activate(gate, up, ACT)
    tl.store(y + row * I + columns, (activated * factor * weight).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_glu_backward(
    dy, gate_up, weights, offsets, dgate_up, y, dweights, I,  # noqa: E741
    EXPERTS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + EXPERTS - 1):
        return
    weight = tl.load(weights + row)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, I, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < I
        gate = tl.load(gate_up + row * (2 * I) + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * I) + I + columns, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + row * I + columns, mask=mask, other=0.0).to(tl.float32)
        activated, slope, factor, factor_slope = activate(gate, up, ACT)
        dweight += d * activated * factor
        d *= weight
        tl.store(dgate_up + row * (2 * I) + columns, (d * factor * slope).to(y.dtype.element_ty), mask=mask)
        dup = d * activated * factor_slope
        tl.store(dgate_up + row * (2 * I) + I + columns, dup.to(y.dtype.element_ty), mask=mask)
        tl.store(y + row * I + columns, (activated * factor * weight).to(y.dtype.element_ty), mask=mask)
    tl.store(dweights + row, tl.sum(dweight, 0))


def gather_rows(x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.gather_rows`."""
    assert x.is_contiguous()
    rows, width = tokens.shape[0], x.shape[1]
    block, blocks, warps = row_blocks(width)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _gather[(rows, blocks)](x, tokens, offsets, y, width, offsets.shape[0], BLOCK=block, num_warps=warps)
    return y


def sum_rows(y: Tensor, positions: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.sum_rows`."""
    assert y.is_contiguous() and positions.is_contiguous()
    (tokens, choices), width = positions.shape, y.shape[1]
    block, blocks, warps = row_blocks(width)
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if tokens:
        _sum[(tokens, blocks)](y, positions, out, width, choices, BLOCK=block, num_warps=warps)
    return out


def weighted_glu(gate_up: Tensor, weights: Tensor, offsets: Tensor, act: Activation = "silu") -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.weighted_glu`."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    block, blocks, warps = row_blocks(width)
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _weighted_glu[(rows, blocks)](
            gate_up, weights, offsets, y, width, offsets.shape[0], ACT=act, BLOCK=block, num_warps=warps
        )
    return y


def weighted_glu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor, act: Activation = "silu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.weighted_glu_backward`."""
    assert dy.is_contiguous() and gate_up.is_contiguous()
    rows, width = dy.shape
    block, _, warps = row_blocks(width)
    dgate_up, y, dweights = torch.empty_like(gate_up), torch.empty_like(dy), torch.empty_like(weights)
    if rows:
        _weighted_glu_backward[(rows,)](
            dy,
            gate_up,
            weights,
            offsets,
            dgate_up,
            y,
            dweights,
            width,
            offsets.shape[0],
            ACT=act,
            BLOCK=block,
            num_warps=warps,
        )
    return dgate_up, y, dweights
