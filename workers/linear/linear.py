"""A linear layer's matrix and its three products: F, the gradient for the input in B, and what it leaves to W.

Tensor parallelism cuts a matrix [N, K] along its outputs (column-parallel) or its inputs (row-parallel; Megatron-LM,
arXiv 1909.08053, section 3). T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_gemm import fp8_gemm
from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor, Role
from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.workers.linear.casts import Casts, Operand, RowOperand, SplitOver
from pentad.workers.linear.fp8_gather import gather_forms
from pentad.workers.linear.weight_grad import LinearWgrad, Param, Params
from pentad.workers.parallel.async_ops import AsyncResult
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.row_exchange import RowGroup
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup


class Axes(NamedTuple):
    """The groups of a rank that share a layer's products."""

    tp: TensorParallelGroup
    cp: ContextParallelGroup


class Linear(NamedTuple):
    """Operands are tensors in the compute dtype, or with `casts` forms in 8 bits. `name` is the parameter's."""

    param: Param  # [N, K]
    casts: Casts | None = None
    row_parallel: bool = False
    name: str = ""

    @classmethod
    def bind(cls, params: Params, name: str, casts: Casts | None, *, row_parallel: bool = False) -> Linear:
        return cls(params[name], casts, row_parallel, name)

    @property
    def weight(self) -> Tensor:
        return self.param.weight

    @property
    def dtype(self) -> torch.dtype:
        """That of compute."""
        return self.weight.dtype if self.casts is None else self.casts.dtype

    @property
    def gradient(self) -> Tensor | None:
        return self.param.gradient

    def input(self, axes: Axes, x: Operand, *, rows: bool = False, columns: bool = False) -> Operand:
        """x [T, K] as an operand: rows of F, columns of W."""
        if self.casts is None or not isinstance(x, Tensor):
            return x
        return self.casts.cast(x, "activation", self.name, self._input_split(axes), rows=rows, columns=columns)

    def output_grad(self, axes: Axes, dy: Tensor) -> Operand:
        """The gradient dy [T, N] of the result as an operand of B and of W."""
        return dy if self.casts is None else self.casts.cast(dy, "gradient", self.name, self._output_split(axes))

    def glu(self, axes: Axes, gate_up: Tensor, act: Activation) -> Operand:
        """A gated linear unit's result [T, K] as the operand of F."""
        if self.casts is None:
            return glu(gate_up, act)
        return self.casts.glu(gate_up, act, self.name, self._input_split(axes))

    def glu_backward(
        self, axes: Axes, dy: Tensor, gate_up: Tensor, act: Activation, before: str
    ) -> tuple[Operand, Operand]:
        """(the gradient of gate_up [T, 2K] as an operand of the product with the parameter `before`, the unit's result
        [T, K] as one of W)."""
        if self.casts is None:
            return glu_backward(dy, gate_up, act)
        return self.casts.glu_backward(dy, gate_up, act, self.name, before, self._input_split(axes))

    def forward(self, axes: Axes, x: Operand, bias: Tensor | None = None) -> Tensor:
        """[T, N]"""
        if isinstance(x, Fp8Forms):
            rows, matrix = _given(x.rows), _given(self._forms(axes, columns=False).rows)
            self._sample("activation", rows)
            self._sample("weight", matrix)
            y = fp8_gemm(rows, matrix, self.dtype)
            return y if bias is None else y.add_(bias)
        weight = self.weight.t()
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def input_grad(self, axes: Axes, dy: Operand) -> Tensor:
        """[T, K]"""
        if isinstance(dy, Fp8Forms):
            rows = _given(dy.rows)
            self._sample("gradient", rows)
            return fp8_gemm(rows, _given(self._forms(axes, columns=True).columns), self.dtype)
        return torch.mm(dy, self.weight)

    def forward_gathered(self, axes: Axes, x: Operand, bias: Tensor | None = None) -> AsyncResult[Tensor]:
        """[T, N] from this rank's rows [T / tp, K] of the input of a column-parallel product."""
        if self.casts is None and isinstance(x, Tensor):
            return axes.tp.gathered_matmul(x, self.weight.t(), bias)
        return gather(axes, x).then(lambda full: self.forward(axes, self.input(axes, full, rows=True), bias))

    def input_grad_gathered(self, axes: Axes, dy: Tensor) -> AsyncResult[tuple[Operand, Tensor]]:
        """(dy as an operand of W, gradient [T, K] of the input) from this rank's rows [T / tp, N] of the gradient dy of
        a row-parallel product's result."""
        if self.casts is None:
            return axes.tp.all_gather_matmul(dy, self.weight)

        def product(full: Tensor) -> tuple[Operand, Tensor]:
            operand = self.output_grad(axes, full)
            return operand, self.input_grad(axes, operand)

        return axes.tp.all_gather(dy).then(product)

    def forward_scattered(self, axes: Axes, x: Operand) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum over the tp ranks, of a row-parallel product."""
        if isinstance(x, Fp8Forms):
            return axes.tp.reduce_scatter(self.forward(axes, x))
        return axes.tp.matmul_reduce_scatter(x, self.weight.t())

    def input_grad_scattered(self, axes: Axes, dy: Operand) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, K] of the sum over the tp ranks, of a column-parallel product."""
        if isinstance(dy, Fp8Forms):
            return axes.tp.reduce_scatter(self.input_grad(axes, dy))
        return axes.tp.matmul_reduce_scatter(dy, self.weight)

    def wgrad(self, dy: Operand, x: Operand) -> LinearWgrad:
        if isinstance(dy, Fp8Forms) and isinstance(x, Fp8Forms):
            return LinearWgrad(self.gradient, _given(dy.columns), _given(x.columns))
        assert isinstance(dy, Tensor) and isinstance(x, Tensor)
        return LinearWgrad(self.gradient, dy, x)

    def _sample(self, role: Role, operand: Fp8Tensor) -> None:
        if self.casts is not None and self.casts.samples is not None:
            self.casts.samples.add(self.name, role, operand)

    def _input_split(self, axes: Axes) -> SplitOver:
        return SplitOver(axes.cp, axes.tp if self.row_parallel else RowGroup())

    def _output_split(self, axes: Axes) -> SplitOver:
        return SplitOver(axes.cp, RowGroup() if self.row_parallel else axes.tp)

    def _forms(self, axes: Axes, *, columns: bool) -> Fp8Forms:
        """That of rows, and with `columns` the other one, which a cast makes anyway."""
        assert self.casts is not None
        if self.param.scales is not None:
            return self.casts.gathered(self.weight, self.param.scales, columns=columns)
        split = SplitOver(features=axes.tp) if self.row_parallel else SplitOver(tokens=axes.tp)
        return self.casts.weight(self.weight, split)


def gather(axes: Axes, x: Operand) -> AsyncResult[Operand]:
    """All rows of what tp ranks have parts of."""
    return axes.tp.all_gather(x) if isinstance(x, Tensor) else gather_forms(axes.tp, x)


def plain(x: Operand | RowOperand) -> Tensor:
    """An operand of a product that is never in 8 bits."""
    assert isinstance(x, Tensor)
    return x


def _given(form: Fp8Tensor | None) -> Fp8Tensor:
    assert form is not None
    return form
