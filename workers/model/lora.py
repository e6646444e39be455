"""Adapters beside frozen matrices (LoRA, arXiv 2106.09685) under tensor parallelism with sequence parallelism.

Ranks exchange only rows as long as the adapters' rank r: only narrow products are gathered or reduced, never another
residual stream. B recomputes the narrow product of F, so nothing is saved. T tokens, T / tp of them in this rank's part
of the residual stream; K inputs and N outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.moe.moe_permute import gather_rows
from pentad.workers.linear.casts import Operand
from pentad.workers.linear.linear import plain
from pentad.workers.linear.weight_grad import GroupedWgrad, LinearWgrad, Param, Params, Wgrad
from pentad.workers.model.layer_context import LayerContext
from pentad.workers.parallel.async_ops import Task, gather2


class Adapter(NamedTuple):
    """Adds alpha / r x A^T B^T to the columns `outputs` of a product."""

    a: Param  # [r, K]
    b: Param  # [N, r]
    outputs: slice

    @classmethod
    def bind_all(cls, params: Params, prefix: str, widths: Mapping[str, int]) -> tuple[Adapter, ...]:
        """The adapters of modules whose outputs, with these `widths`, lie side by side in one product."""
        found, end = list[Adapter](), 0
        for name, width in widths.items():
            start, end, at = end, end + width, f"{prefix}.{name}"
            if f"{at}.lora_A" in params:
                found.append(cls(params[f"{at}.lora_A"], params[f"{at}.lora_B"], slice(start, end)))
        return tuple(found)


class ColumnAdapters(NamedTuple):
    """Adapters of modules with a common input, whose outputs are split by tp: B is split, A replicated."""

    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def bind(cls, params: Params, prefix: str, widths: Mapping[str, int], fused: str) -> ColumnAdapters:
        """The adapters of modules with these widths, or that of the `fused` module that has all their outputs."""
        of_all = Adapter.bind_all(params, prefix, {fused: sum(widths.values())})
        return cls(of_all or Adapter.bind_all(params, prefix, widths))

    def add_(self, context: LayerContext, x: Operand, out: Tensor) -> Task[None]:
        """Adds to the product [T, N] of the input whose local rows are x [T / tp, K]."""
        if not self.adapters:
            return
        narrow = yield from context.tp.all_gather(torch.mm(plain(x), self._a.t()))  # [T, r of all]
        for adapter, part in zip(self.adapters, self._by_adapter(narrow), strict=True):
            out[:, adapter.outputs].addmm_(part, adapter.b.weight.t(), alpha=context.lora_scale)

    def backward_(self, context: LayerContext, x: Operand, dout: Operand, dx: Tensor) -> Task[list[Wgrad]]:
        """The work for W, from the gradient [T, N] of the product; adds to the gradient dx [T / tp, K] of x."""
        if not self.adapters:
            return []
        x, dout = plain(x), plain(dout)
        parts = [torch.mm(dout[:, each.outputs], each.b.weight).mul_(context.lora_scale) for each in self.adapters]
        gather = context.tp.all_gather(torch.mm(plain(x), self._a.t()))
        narrow, dnarrow = yield from gather2(gather, context.tp.reduce_scatter(torch.cat(parts, dim=1)))
        dx.addmm_(dnarrow, self._a)
        work = list[Wgrad]()
        pairs = zip(self._by_adapter(narrow), self._by_adapter(dnarrow), strict=True)
        for adapter, (low, dlow) in zip(self.adapters, pairs, strict=True):
            work.append(LinearWgrad(adapter.b.gradient, dout[:, adapter.outputs], low * context.lora_scale))
            work.append(LinearWgrad(adapter.a.gradient, dlow, x))
        return work

    @property
    def _a(self) -> Tensor:
        return torch.cat([adapter.a.weight for adapter in self.adapters])

    def _by_adapter(self, narrow: Tensor) -> tuple[Tensor, ...]:
        return narrow.split([adapter.a.weight.shape[0] for adapter in self.adapters], dim=1)


class RowAdapter(NamedTuple):
    """The adapter, if any, of a module whose inputs are split by tp: A is split, B replicated."""

    adapter: Adapter | None = None

    @classmethod
    def bind(cls, params: Params, name: str, width: int) -> RowAdapter:
        prefix, _, module = name.rpartition(".")
        return cls(next(iter(Adapter.bind_all(params, prefix, {module: width})), None))

    def add_(self, context: LayerContext, x: Operand, out: Tensor) -> Task[None]:
        """Adds to the local rows [T / tp, N] of the product with x [T, K]."""
        if self.adapter is None:
            return
        narrow = yield from context.tp.reduce_scatter(torch.mm(plain(x), self.adapter.a.weight.t()))  # [T / tp, r]
        out.addmm_(narrow, self.adapter.b.weight.t(), alpha=context.lora_scale)

    def narrow_grad(self, context: LayerContext, dout: Tensor) -> Task[Tensor | None]:
        """The gradient [T, r] of x A^T, from that of the product's local rows [T / tp, N]."""
        if self.adapter is None:
            return None
        return (yield from context.tp.all_gather(torch.mm(dout, self.adapter.b.weight).mul_(context.lora_scale)))

    def input_grad_(self, dnarrow: Tensor | None, dx: Tensor) -> None:
        """Adds the adapter's part to the gradient [T, K] of x."""
        if self.adapter is not None and dnarrow is not None:
            dx.addmm_(dnarrow, self.adapter.a.weight)

    def wgrads(self, context: LayerContext, x: Operand, dout: Tensor, dnarrow: Tensor | None) -> Task[list[Wgrad]]:
        """The work for W."""
        if self.adapter is None or dnarrow is None:
            return []
        narrow = yield from context.tp.reduce_scatter(torch.mm(plain(x), self.adapter.a.weight.t()))
        return [
            LinearWgrad(self.adapter.b.gradient, dout, narrow * context.lora_scale),
            LinearWgrad(self.adapter.a.gradient, dnarrow, plain(x)),
        ]


class LocalAdapter(NamedTuple):
    """The adapter, if any, of a module that every tp rank applies to its own tokens: A and B are replicated."""

    adapter: Adapter | None = None

    @classmethod
    def bind(cls, params: Params, name: str, width: int) -> LocalAdapter:
        return cls(RowAdapter.bind(params, name, width).adapter)

    def add_(self, context: LayerContext, x: Tensor, out: Tensor) -> None:
        """Adds to the product [T / tp, N] of x [T / tp, K]."""
        if self.adapter is not None:
            narrow = torch.mm(x, self.adapter.a.weight.t())
            out.addmm_(narrow, self.adapter.b.weight.t(), alpha=context.lora_scale)

    def backward_(self, context: LayerContext, x: Tensor, dout: Tensor, dx: Tensor) -> list[Wgrad]:
        """The work for W, from the gradient [T / tp, N] of the product; adds to the gradient dx [T / tp, K] of x."""
        if self.adapter is None:
            return []
        (a, b, _), scale = self.adapter, context.lora_scale
        dnarrow = torch.mm(dout, b.weight).mul_(scale)
        dx.addmm_(dnarrow, a.weight)
        narrow = torch.mm(x, a.weight.t()).mul_(scale)
        return [LinearWgrad(b.gradient, dout, narrow), LinearWgrad(a.gradient, dnarrow, x)]


class ExpertAdapter(NamedTuple):
    """The adapter of the experts' matrices; every expert has its own A and B.

    tp splits B if it splits the outputs of the matrices, and A if it splits their inputs: either way, summing over the
    ranks gives the right outputs, and the right gradients of the replicated factor. R rows, sorted by expert; each
    expert's rows end at its entry of `offsets`.
    """

    a: Param  # [local, r, K]
    b: Param  # [local, N, r]

    @classmethod
    def bind(cls, params: Params, name: str) -> ExpertAdapter | None:
        """None if these matrices have no adapters."""
        if f"{name}.lora_A" not in params:
            return None
        return cls(params[f"{name}.lora_A"], params[f"{name}.lora_B"])

    def add_(self, context: LayerContext, x: Tensor, offsets: Tensor, out: Tensor) -> None:
        """Adds to the products [R, N] of the rows x [R, K]."""
        out.add_(grouped_gemm(self._narrow(x, offsets), self.b.weight, offsets), alpha=context.lora_scale)

    def input_grad_(self, context: LayerContext, dout: Tensor, offsets: Tensor, dx: Tensor) -> Tensor:
        """The gradient [R, r] of x A^T, from that of the products [R, N]; adds to the gradient [R, K] of x."""
        dnarrow = grouped_gemm(dout, self.b.weight.transpose(1, 2), offsets).mul_(context.lora_scale)
        dx.add_(grouped_gemm(dnarrow, self.a.weight.transpose(1, 2), offsets))
        return dnarrow

    def wgrads(
        self,
        context: LayerContext,
        dout: Tensor,
        x: Tensor,
        dnarrow: Tensor,
        offsets: Tensor,
        dout_rows: Tensor | None,
        x_rows: Tensor | None,
    ) -> list[Wgrad]:
        """The work for W; row indices as in GroupedWgrad."""
        rows = x if x_rows is None else gather_rows(x, x_rows, offsets)
        narrow = self._narrow(rows, offsets).mul_(context.lora_scale)
        return [
            GroupedWgrad(self.b.gradient, dout, narrow, offsets, dout_rows, None),
            GroupedWgrad(self.a.gradient, dnarrow, x, offsets, None, x_rows),
        ]

    def _narrow(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm(x, self.a.weight, offsets)
