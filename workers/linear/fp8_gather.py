"""Gathers the rows of 8-bit operands split over tp ranks: half the bytes of 16-bit ones.

The parts are whole tiles, so they are cast as they would be in the full matrix. t tokens of T, K features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor
from pentad.workers.parallel.async_ops import AsyncResult, gather2, ready
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup


def gather_forms(tp: TensorParallelGroup, forms: Fp8Forms, *, keep: bool = True) -> AsyncResult[Fp8Forms]:
    """The forms of [T, K] from those of this rank's rows [t, K]; the scale of a tensor is the same on all ranks. Unless
    `keep`, this rank's own values may be missing in `rows`."""
    if tp.size == 1:
        return ready(forms)
    rows, columns = forms
    found = gather2(_gather(tp, rows, 0, keep=keep), _gather(tp, columns, 1))
    return found.then(lambda both: Fp8Forms(*both))


def _gather(
    tp: TensorParallelGroup, form: Fp8Tensor | None, dim: int, *, keep: bool = True
) -> AsyncResult[Fp8Tensor | None]:
    """`dim` is the dimension of the tokens."""
    if form is None:
        return ready(None)
    values, scales = form
    whole = ready(scales) if scales.numel() == 1 else _along(tp, scales.t(), 1 - dim).then(Tensor.t)
    found = gather2(_along(tp, values.view(torch.uint8), dim, keep=keep), whole)
    return found.then(lambda both: Fp8Tensor(both[0].view(values.dtype), both[1]))


def _along(tp: TensorParallelGroup, x: Tensor, dim: int, *, keep: bool = True) -> AsyncResult[Tensor]:
    """The parts of all ranks, concatenated along a dimension."""
    if dim == 0:
        return tp.all_gather(x, keep=keep)
    return tp.all_gather_stacked(x).then(lambda parts: parts.transpose(0, 1).flatten(1))
