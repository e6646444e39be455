"""Parameters as layers see them, and W as data: the weight gradients that B leaves to be added later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype
from pentad.kernels.embedding_wgrad import accumulate_embedding_gradient_
from pentad.kernels.fp8.fp8_gemm import accumulate_fp8_gradient_
from pentad.kernels.fp8.fp8_grouped import dequantize_rows
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor
from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_
from pentad.kernels.moe.moe_permute import gather_rows
from pentad.kernels.wgrad_gemm import accumulate_gradient_
from pentad.workers.linear.logit_chunks import HeadWgrad
from pentad.workers.params.param_buffers import Unwritten


class Param(NamedTuple):
    weight: Tensor  # in the compute dtype or, with `scales`, in 8 bits
    gradient: Tensor | None  # the main gradient; None: the weight is frozen
    scales: Tensor | None = None  # of a weight that was gathered in 8 bits


Params = dict[str, Param]  # by name


class LinearWgrad(NamedTuple):
    """gradient [N, K] += dy [T, N]^T @ x [T, K]; in 8 bits dy and x are transposed."""

    gradient: Tensor | None
    dy: Tensor | Fp8Tensor
    x: Tensor | Fp8Tensor


class AddWgrad(NamedTuple):
    """gradient [H] += dy [H]"""

    gradient: Tensor | None
    dy: Tensor


class EmbeddingWgrad(NamedTuple):
    """gradient [V, H] += dy [T, H] at the rows `tokens` [T]; -1: another rank's token."""

    gradient: Tensor | None
    dy: Tensor
    tokens: Tensor


class GroupedWgrad(NamedTuple):
    """gradient[e] [N, K] += dy_e^T @ x_e over the rows of expert e, which end at `offsets[e]`.

    `dy_rows` and `x_rows` [R] give the row of dy [.., N] and of x [.., K] for each row; None: they are already in
    order. 8-bit operands are cast back to `dtype`.
    """

    gradient: Tensor | None
    dy: Tensor | Fp8Tensor
    x: Tensor | Fp8Tensor
    offsets: Tensor
    dy_rows: Tensor | None
    x_rows: Tensor | None
    dtype: torch.dtype = torch.float32


Wgrad = LinearWgrad | AddWgrad | EmbeddingWgrad | GroupedWgrad | HeadWgrad


def bias_wgrad(bias: Param, dy: Tensor) -> AddWgrad:
    """The work for W of a bias [N], from the gradient dy [T, N] of the sum."""
    return AddWgrad(bias.gradient, dy.sum(0, dtype=accumulation_dtype(dy.dtype)))


def accumulate_wgrads(work: list[Wgrad], unwritten: Unwritten) -> None:
    """Adds the weight gradients of one microbatch slice to the main gradients, in order; frozen weights have none.

    Gradients that are `unwritten` have arbitrary contents, which the first contribution overwrites.
    """
    for item in work:
        match item:
            case LinearWgrad(Tensor() as gradient, Tensor() as dy, Tensor() as x):
                accumulate_gradient_(gradient, dy, x, overwrite=unwritten.take(gradient))
            case LinearWgrad(Tensor() as gradient, Fp8Tensor() as dy, Fp8Tensor() as x):
                accumulate_fp8_gradient_(gradient, dy, x, overwrite=unwritten.take(gradient))
            case HeadWgrad(Tensor() as gradient):
                item.accumulate(gradient, overwrite=unwritten.take(gradient))
            case AddWgrad(Tensor() as gradient, dy):
                _add(gradient, dy, overwrite=unwritten.take(gradient))
            case EmbeddingWgrad(Tensor() as gradient, dy, tokens):
                accumulate_embedding_gradient_(gradient, dy, tokens, overwrite=unwritten.take(gradient))
            case GroupedWgrad(Tensor() as gradient, dy, x, offsets, dy_rows, x_rows, dtype):
                left, right = _sorted(dy, dy_rows, offsets, dtype), _sorted(x, x_rows, offsets, dtype)
                accumulate_grouped_gradient_(gradient, left, right, offsets, overwrite=unwritten.take(gradient))


def _sorted(x: Tensor | Fp8Tensor, rows: Tensor | None, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand's rows [R, ..], sorted by expert and in the compute dtype."""
    if isinstance(x, Fp8Tensor):
        return dequantize_rows(x, offsets, dtype, rows)
    return x if rows is None else gather_rows(x, rows, offsets)


def _add(gradient: Tensor, dy: Tensor, *, overwrite: bool) -> None:
    gradient.copy_(dy) if overwrite else gradient.add_(dy)
