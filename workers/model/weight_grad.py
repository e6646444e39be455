"""W as data: what a backward pass leaves to be added to the main gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_
from pentad.kernels.moe.moe_permute import gather_rows
from pentad.kernels.wgrad_gemm import accumulate_gradient_


class Product(NamedTuple):
    """gradient [N, K] += dy [T, N]^T @ x [T, K]"""

    gradient: torch.Tensor
    dy: torch.Tensor
    x: torch.Tensor


class Sum(NamedTuple):
    """gradient [H] += dy [H]"""

    gradient: torch.Tensor
    dy: torch.Tensor


class Lookup(NamedTuple):
    """gradient [V, H] += rows dy [T, H] at tokens [T]"""

    gradient: torch.Tensor
    dy: torch.Tensor
    tokens: torch.Tensor


class Grouped(NamedTuple):
    """gradient[e] [N, K] += dy_e^T @ x_e over the rows of expert e, up to `offsets[e]` of them all; `dy_rows` and
    `x_rows` [R] say which row of dy [.., N] and of x [.., K] each is, where it is not that of its number."""

    gradient: torch.Tensor
    dy: torch.Tensor
    x: torch.Tensor
    offsets: torch.Tensor
    dy_rows: torch.Tensor | None
    x_rows: torch.Tensor | None


Deferred = Product | Sum | Lookup | Grouped


def accumulate(work: list[Deferred]) -> None:
    """Runs the deferred products of one microbatch into the main gradients, in order."""
    for item in work:
        match item:
            case Product(gradient, dy, x):
                accumulate_gradient_(gradient, dy, x)
            case Sum(gradient, dy):
                gradient += dy
            case Lookup(gradient, dy, tokens):
                # sorts the tokens first, so the order of additions is the same in every run
                rows = torch.ops.aten.embedding_dense_backward(
                    dy.to(gradient.dtype), tokens, gradient.shape[0], -1, False
                )
                gradient += rows
            case Grouped(gradient, dy, x, offsets, dy_rows, x_rows):
                left = dy if dy_rows is None else gather_rows(dy, dy_rows, offsets)
                right = x if x_rows is None else gather_rows(x, x_rows, offsets)
                accumulate_grouped_gradient_(gradient, left, right, offsets)
