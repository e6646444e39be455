"""RMSNorm as part of a layer: what B needs of it, and what it leaves to W.

Queries and keys are normed head by head (Qwen3), or over all heads as one vector (OLMo 2, arXiv 2501.00656); the tp
ranks split that vector, and exchange means.

T tokens, N query heads and M key-value heads of this rank, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.backend import accumulation_dtype
from pentad.kernels.heads.qk_norm_rope import norm_and_rotate_, norm_and_rotate_backward_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.weight_grad import AddWgrad, Param, Params, Wgrad
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.row_split import RowSplit
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup


class SavedNorm(NamedTuple):
    input: Tensor  # [rows, D]
    rstd: Tensor  # [rows]

    def first(self, split: RowSplit) -> SavedNorm:
        """The same for the first rows."""
        return SavedNorm(split.first(self.input), split.first(self.rstd))

    def joined(self, rest: SavedNorm, split: RowSplit) -> SavedNorm:
        """The same for all rows, given the `rest` of them."""
        return SavedNorm(split.join(self.input, rest.input), split.join(self.rstd, rest.rstd))


class Norm(NamedTuple):
    """Multiplies normed rows by the weight + `offset`."""

    param: Param  # [D]
    eps: float
    offset: float

    @classmethod
    def bind(cls, params: Params, name: str, model: ModelSpec) -> Norm:
        return cls(params[name], model.norm_eps, model.norm_offset)

    @classmethod
    def bind_optional(cls, params: Params, name: str, model: ModelSpec) -> Norm | None:
        """None for a model without this norm."""
        return cls.bind(params, name, model) if name in params else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, SavedNorm]:
        """(normed rows of x + residual [rows, D], what B needs)."""
        normed, *saved = rms_norm(x, self.param.weight, self.eps, residual, self.offset)
        return normed, SavedNorm(*saved)

    def backward(
        self, dy: Tensor, saved: SavedNorm, dresidual: Tensor | None = None, again: Tensor | None = None
    ) -> tuple[Tensor, AddWgrad]:
        """(gradient [rows, D] of the input, plus `dresidual`; work for W) from the gradient of the normed rows, which
        are recomputed into `again` [rows, D] if given."""
        dx, dweight = rms_norm_backward(dy, saved.input, self.param.weight, saved.rstd, dresidual, self.offset, again)
        return dx, AddWgrad(self.param.gradient, dweight)

    def rotated_(self, x: Tensor, cos: Tensor, sin: Tensor) -> SavedNorm:
        """Norms heads x [T, N, D], each separately, then rotates them, in place; returns what B needs."""
        return SavedNorm(*norm_and_rotate_(x, self.param.weight, self.eps, cos, sin, self.offset))

    def rotated_backward_(self, dx: Tensor, saved: SavedNorm, cos: Tensor, sin: Tensor) -> AddWgrad:
        """The work for W; turns the gradient of what `rotated_` wrote into that of what it read, in place."""
        given = saved.input, self.param.weight, saved.rstd, cos, sin, self.offset
        return AddWgrad(self.param.gradient, norm_and_rotate_backward_(dx, *given))


class QKNormSaved(NamedTuple):
    query: SavedNorm  # of rows [T N, D], or [T, N D]
    key: SavedNorm  # of rows [T M, D], or [T, M D]

    def splits(self, split: RowSplit, tokens: int) -> tuple[RowSplit, RowSplit]:
        """The splits of query and key rows, for this many tokens."""
        query, key = (split.of_each(len(each.rstd) // tokens) for each in self)
        return query, key


class QKNorm(NamedTuple):
    query: Norm  # [D], or [N D]
    key: Norm  # [D], or [M D]
    of_all_heads: bool

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec) -> QKNorm:
        query, key = (Norm.bind(params, f"{prefix}.{name}_norm", model) for name in ("query", "key"))
        return cls(query, key, model.qk_norm == "all_heads")

    def forward_(self, tp: TensorParallelGroup, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Task[QKNormSaved]:
        """Norms queries [T, N, D] and keys [T, M, D], then rotates them, in place."""
        norms = self.query, self.key
        if not self.of_all_heads:
            return QKNormSaved(*(norm.rotated_(x, cos, sin) for norm, x in zip(norms, (q, k), strict=True)))
        rows = _rows(q), _rows(k)
        if tp.size > 1:
            found = yield from _norm_split(tp, norms, rows)
        else:
            found = [norm.forward(x) for norm, x in zip(norms, rows, strict=True)]
        for heads, (x, _) in zip((q, k), found, strict=True):
            rope_(heads.copy_(x.view(heads.shape)), cos, sin)
        return QKNormSaved(*(saved for _, saved in found))

    def backward_(
        self, tp: TensorParallelGroup, dq: Tensor, dk: Tensor, saved: QKNormSaved, cos: Tensor, sin: Tensor
    ) -> Task[list[Wgrad]]:
        """The work for W; turns the gradients of the heads after `forward_` into those before it, in place."""
        norms = self.query, self.key
        if not self.of_all_heads:
            given = zip(norms, (dq, dk), saved, strict=True)
            return [norm.rotated_backward_(dx, each, cos, sin) for norm, dx, each in given]
        for dx in (dq, dk):
            rope_(dx, cos, sin, inverse=True)
        dys = _rows(dq), _rows(dk)
        if tp.size > 1:
            found = yield from _norm_split_backward(tp, norms, dys, saved)
        else:
            found = [norm.backward(dy, each) for norm, dy, each in zip(norms, dys, saved, strict=True)]
        for heads, (dx, _) in zip((dq, dk), found, strict=True):
            heads.copy_(dx.view(heads.shape))
        return [each for _, each in found]


def _rows(heads: Tensor) -> Tensor:
    """A copy [T, heads D], even for a single head, where `reshape` would return a view."""
    return heads.clone(memory_format=torch.contiguous_format).flatten(1)


def _norm_split(
    tp: TensorParallelGroup, norms: tuple[Norm, Norm], rows: tuple[Tensor, Tensor]
) -> Task[list[tuple[Tensor, SavedNorm]]]:
    """(normed rows, what B needs) of each norm; the ranks hold equal parts of each row [T, ...]."""
    wide = [x.to(accumulation_dtype(x.dtype)) for x in rows]
    means = yield from _mean_over_ranks(tp, [x.square().mean(1) for x in wide])
    found = []
    for norm, x, mean, row in zip(norms, wide, means, rows, strict=True):
        rstd = torch.rsqrt(mean + norm.eps)
        normed = x * rstd[:, None] * (norm.param.weight.to(x.dtype) + norm.offset)
        found.append((normed.to(row.dtype), SavedNorm(row, rstd)))
    return found


def _norm_split_backward(
    tp: TensorParallelGroup, norms: tuple[Norm, Norm], dys: tuple[Tensor, Tensor], saved: QKNormSaved
) -> Task[list[tuple[Tensor, AddWgrad]]]:
    """(gradient of the input, work for W) of each norm.

    Ranks that share a key-value head hold partial sums of its gradient. The mean over the ranks counts each of them
    once, and each rank subtracts its share.
    """
    inputs = []  # normed input, gradient of the normed input
    work = list[AddWgrad]()
    for norm, dy, (x, rstd) in zip(norms, dys, saved, strict=True):
        wide, normed = dy.to(rstd.dtype), x.to(rstd.dtype) * rstd[:, None]
        inputs.append((normed, wide * (norm.param.weight.to(rstd.dtype) + norm.offset)))
        work.append(AddWgrad(norm.param.gradient, (wide * normed).sum(0)))
    means = yield from _mean_over_ranks(tp, [(g * normed).mean(1) for normed, g in inputs])
    dxs = [
        ((g - normed * mean[:, None]) * each.rstd[:, None]).to(each.input.dtype)
        for (normed, g), mean, each in zip(inputs, means, saved, strict=True)
    ]
    return list(zip(dxs, work, strict=True))


def _mean_over_ranks(tp: TensorParallelGroup, values: list[Tensor]) -> Task[Tensor]:
    """The means [K, T] over the ranks of K values [T] each, summed in the order of the ranks."""
    by_rank = yield from tp.all_gather_stacked(torch.stack(values))
    return by_rank.mean(0)
