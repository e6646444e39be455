"""Token permutation in Triton: a program takes a row or a token; programs of unused rows return at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.glu import Activation
from pentad.kernels.glu_triton import activate, row_blocks
from pentad.kernels.moe.moe_permute import ExpertRows

TILE = 1024  # pairs of a token and an expert in a program that sorts
VALUES = 1024  # in a program that copies single values


@triton.jit
def _visits(experts, tokens, columns, first, T, K: tl.constexpr, LOCAL: tl.constexpr):
    """1 where a token [TOKENS, 1] visits a local expert [1, LP], 0 elsewhere."""
    visits = (tokens + columns) * 0
    for choice in tl.static_range(K):
        expert = tl.load(experts + tokens * K + choice, mask=tokens < T, other=-1) - first
        visits += ((columns == expert) & (columns < LOCAL)).to(tl.int64)
    return visits


@triton.jit
def _count(
    experts, counts, first, T, K: tl.constexpr, LOCAL: tl.constexpr, TOKENS: tl.constexpr, LP: tl.constexpr
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
    visits = _visits(experts, tokens, tl.arange(0, LP).to(tl.int64)[None, :], first, T, K, LOCAL)
    columns = tl.arange(0, LP)
    tl.store(counts + tl.program_id(0) * LOCAL + columns, tl.sum(visits, 0).to(tl.int32), mask=columns < LOCAL)


@triton.jit
def _place(
    experts, weights, counts, offsets, chosen, row_weights, positions, first, T,
    K: tl.constexpr, LOCAL: tl.constexpr, TOKENS: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Rows of an expert begin at the offset of the one before; those of this program's tokens follow those of earlier
    programs."""
    block = tl.program_id(0)
    tokens = block * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
    columns = tl.arange(0, LP).to(tl.int64)[None, :]
    visits = _visits(experts, tokens, columns, first, T, K, LOCAL)
    is_local = columns < LOCAL
    start = tl.load(offsets + columns - 1, mask=is_local & (columns > 0), other=0).to(tl.int64)
    earlier = tl.load(counts + (block - 1) * LOCAL + columns, mask=is_local & (block > 0), other=0).to(tl.int64)
    rows = start + earlier + tl.cumsum(visits, 0) - visits
    for choice in tl.static_range(K):
        expert = tl.load(experts + tokens * K + choice, mask=tokens < T, other=-1) - first
        found = (columns == expert) & is_local
        is_row = tl.sum(found.to(tl.int64), 1)[:, None] > 0
        row = tl.sum(tl.where(found, rows, 0), 1)[:, None]
        tl.store(positions + tokens * K + choice, tl.where(is_row, row, -1), mask=tokens < T)
        tl.store(chosen + row, tokens, mask=is_row)
        weight = tl.load(weights + tokens * K + choice, mask=is_row, other=0.0)
        tl.store(row_weights + row, weight, mask=is_row)


@triton.jit
def _values(values, positions, out, N, BLOCK: tl.constexpr):
    choices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row = tl.load(positions + choices, mask=choices < N, other=-1)
    tl.store(out + choices, tl.load(values + row, mask=row >= 0, other=0.0), mask=choices < N)


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


def sort_by_expert(experts: Tensor, weights: Tensor, first: int, local: int) -> ExpertRows:
    """Counts the rows of each block of tokens, then places them; see `pentad.kernels.moe.moe_permute.sort_by_expert`.

    Unused rows are of token 0, with a weight of 0.
    """
    (tokens, choices), device = experts.shape, experts.device
    width = triton.next_power_of_2(local)
    block = max(1, TILE // width)
    programs, sizes = ceil_div(tokens, block), {"K": choices, "LOCAL": local, "TOKENS": block, "LP": width}
    counts = torch.empty(programs, local, dtype=torch.int32, device=device)
    chosen = torch.zeros(tokens * min(choices, local), dtype=torch.int64, device=device)
    row_weights = torch.zeros_like(chosen, dtype=weights.dtype)
    positions = torch.empty_like(experts)
    if not programs:
        return ExpertRows(chosen, row_weights, positions, torch.zeros(local, dtype=torch.int32, device=device))
    _count[(programs,)](experts, counts, first, tokens, **sizes)
    counts = counts.cumsum(0, dtype=torch.int32)
    offsets = counts[-1].cumsum(0, dtype=torch.int32)
    rows = (chosen, row_weights, positions)
    _place[(programs,)](experts, weights, counts, offsets, *rows, first, tokens, **sizes)
    return ExpertRows(*rows, offsets)


def values_of_choices(values: Tensor, positions: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.values_of_choices`."""
    out = torch.empty(positions.shape, dtype=values.dtype, device=values.device)
    if out.numel():
        _values[(ceil_div(out.numel(), VALUES),)](values, positions, out, out.numel(), BLOCK=VALUES)
    return out


def gather_rows(x: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.gather_rows`."""
    rows, width = tokens.shape[0], x.shape[1]
    block, blocks, warps = row_blocks(width)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _gather[(rows, blocks)](x, tokens, offsets, y, width, offsets.shape[0], BLOCK=block, num_warps=warps)
    return y


def sum_rows(y: Tensor, positions: Tensor) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.sum_rows`."""
    (tokens, choices), width = positions.shape, y.shape[1]
    block, blocks, warps = row_blocks(width)
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if tokens:
        _sum[(tokens, blocks)](y, positions, out, width, choices, BLOCK=block, num_warps=warps)
    return out


def weighted_glu(gate_up: Tensor, weights: Tensor, offsets: Tensor, act: Activation = "silu") -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_permute.weighted_glu`."""
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
    rows, width = dy.shape
    block, _, warps = row_blocks(width)
    dgate_up, y, dweights = torch.empty_like(gate_up), torch.empty_like(dy), torch.empty_like(weights)
    if rows:
        _weighted_glu_backward[(rows,)](
            dy, gate_up, weights, offsets, dgate_up, y, dweights, width, offsets.shape[0],
            ACT=act, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return dgate_up, y, dweights
