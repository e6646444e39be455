"""Cross-entropy in Triton: a program reads one row once, with a running maximum and sum in every lane.

Lanes are combined once, at the end of the row: the loop has no exchange between threads and costs 1 + 1/DEPTH
exponentials per element (with two, the exponential unit would be the bottleneck).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import IGNORE_INDEX, ceil_div

LANES = 2048
DEPTH = 4
BACKWARD_BLOCK = 4096
# The lowest finite number: unlike -inf, its difference with itself is a number.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP), unless CAP is 0"""
    if CAP != 0.0:
        x = CAP * (2.0 * tl.sigmoid(x * (2.0 / CAP)) - 1.0)
    return x


@triton.jit
def _forward(
    logits, targets, loss, lse, V, CAP: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, IGNORE_INDEX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    highest = tl.full([LANES], LOWEST, dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, V, LANES * DEPTH):
        columns = start + tile
        x = tl.load(base + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        if CAP != 0.0:
            x = tl.where(columns < V, _capped(x, CAP), float("-inf"))
        raised = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - raised) + tl.sum(tl.exp(x - raised[None, :]), axis=0)
        highest = raised
    top = tl.max(highest, axis=0)
    logsum = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    chosen = _capped(tl.load(base + target, mask=inside, other=0.0).to(tl.float32), CAP)
    tl.store(lse + row, logsum)
    tl.store(loss + row, tl.where(target == IGNORE_INDEX, 0.0, logsum - chosen))


@triton.jit
def _backward(
    logits, targets, lse, scale, z_loss, V, CAP: tl.constexpr, BLOCK: tl.constexpr, IGNORE_INDEX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    row = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    place = logits + row.to(tl.int64) * V + columns
    target = tl.load(targets + row)
    x = _capped(tl.load(place, mask=mask, other=0.0).to(tl.float32), CAP)
    logsum = tl.load(lse + row)
    grad = tl.exp(x - logsum) * (1.0 + 2.0 * z_loss * logsum)
    grad = tl.where(columns == target, grad - 1.0, grad) * scale
    if CAP != 0.0:
        grad *= 1.0 - (x / CAP) * (x / CAP)
    grad = tl.where(target == IGNORE_INDEX, 0.0, grad)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=mask)


def cross_entropy(logits: Tensor, targets: Tensor, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Launches the forward kernel; see `pentad.kernels.cross_entropy.cross_entropy`."""
    tokens, vocabulary = logits.shape
    loss = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    _forward[(tokens,)](
        logits, targets, loss, lse, vocabulary, softcap,
        LANES=LANES, DEPTH=DEPTH, IGNORE_INDEX=IGNORE_INDEX, num_warps=8,
    )  # fmt: skip
    return loss, lse


def cross_entropy_backward_(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: float, softcap: float = 0.0, z_loss: float = 0.0
) -> None:
    """Launches the backward kernel; see `pentad.kernels.cross_entropy.cross_entropy_backward_`."""
    tokens, vocabulary = logits.shape
    _backward[(tokens * ceil_div(vocabulary, BACKWARD_BLOCK),)](
        *(logits, targets, lse, scale, z_loss, vocabulary, softcap),
        BLOCK=BACKWARD_BLOCK,
        IGNORE_INDEX=IGNORE_INDEX,
        num_warps=8,
    )
