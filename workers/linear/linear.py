"""A linear layer's matrix and its three products: F, the input gradient in B, and what it leaves to W.

Tensor parallelism splits a matrix [N, K] along its outputs (column-parallel) or its inputs (row-parallel; Megatron-LM,
arXiv 1909.08053, section 3). T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_gemm import fp8_gemm
from pentad.kernels.fp8.fp8_tensor import TILE, Fp8Forms, Fp8Tensor, Role
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
    """Operands are tensors in the compute dtype or, with `casts`, 8-bit forms. `name` is the parameter's name."""

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
        """The compute dtype."""
        return self.weight.dtype if self.casts is None else self.casts.dtype

    @property
    def gradient(self) -> Tensor | None:
        return self.param.gradient

    def input(self, axes: Axes, x: Operand, *, rows: bool = False, columns: bool = False) -> Operand:
        """x [T, K] as an operand: by rows for F, by columns for W."""
        if self.casts is None or not isinstance(x, Tensor):
            return x
        return self.casts.cast(x, "activation", self.name, self._input_split(axes), rows=rows, columns=columns)

    def output_grad(self, axes: Axes, dy: Tensor) -> Operand:
        """The gradient dy [T, N] of the result as an operand of B and W."""
        return dy if self.casts is None else self.casts.cast(dy, "gradient", self.name, self._output_split(axes))

    def glu(self, axes: Axes, gate_up: Tensor, act: Activation) -> Operand:
        """A gated linear unit's result [T, K] as an operand of F."""
        if self.casts is None:
            return glu(gate_up, act)
        return self.casts.glu(gate_up, act, self.name, self._input_split(axes))

    def glu_backward(
        self, axes: Axes, dy: Tensor, gate_up: Tensor, act: Activation, before: str
    ) -> tuple[Operand, Operand]:
        """(the gradient of gate_up [T, 2K] as an operand of the product with the parameter `before`, the unit's result
        [T, K] as an operand of W)."""
        if self.casts is None:
            return glu_backward(dy, gate_up, act)
        return self.casts.glu_backward(dy, gate_up, act, self.name, before, self._input_split(axes))

    def forward(self, axes: Axes, x: Operand, bias: Tensor | None = None) -> Tensor:
        """[T, N]"""
        return self._multiply("activation", _rows_of(x), self._matrix(axes, "activation"), bias)

    def input_grad(self, axes: Axes, dy: Operand) -> Tensor:
        """[T, K]"""
        return self._multiply("gradient", _rows_of(dy), self._matrix(axes, "gradient"))

    def forward_gathered(self, axes: Axes, x: Operand, bias: Tensor | None = None) -> AsyncResult[Tensor]:
        """[T, N] from this rank's rows [T / tp, K] of the input of a column-parallel product."""
        return self.gather_forward(axes, x, bias, keep=False).then(lambda both: both[1]())

    def gather_forward(
        self, axes: Axes, x: Operand, bias: Tensor | None = None, *, keep: bool = True
    ) -> AsyncResult[tuple[Operand, Callable[[], Tensor]]]:
        """(all rows of x, a function that completes the product [T, N]). This rank's rows are multiplied while the
        others arrive; unless `keep`, they may be missing from the result."""
        if self._overlaps(axes, x):
            amax = self._amax(axes, x, "activation")
            return self._multiply_gathered(axes, x, "activation", self._input_split(axes), bias, amax=amax, keep=keep)

        def product(full: Operand) -> Tensor:
            return self.forward(axes, self.input(axes, full, rows=True), bias)

        return gather(axes, x).then(lambda full: (full, lambda: product(full)))

    def input_grad_gathered(self, axes: Axes, dy: Tensor) -> AsyncResult[tuple[Operand, Tensor]]:
        """(dy as an operand of W, gradient [T, K] of the input) from this rank's rows [T / tp, N] of the gradient dy of
        a row-parallel product's result."""
        return self.gather_input_grad(axes, dy).then(lambda both: both[1]())

    def gather_input_grad(
        self, axes: Axes, dy: Tensor
    ) -> AsyncResult[tuple[Tensor, Callable[[], tuple[Operand, Tensor]]]]:
        """(all rows of dy, a function that returns what `input_grad_gathered` does); this rank's rows are multiplied
        while the others arrive."""

        def after(full: Tensor) -> tuple[Operand, Tensor]:
            operand = self.output_grad(axes, full)
            return operand, self.input_grad(axes, operand)

        if not self._overlaps(axes, dy):
            return axes.tp.all_gather(dy).then(lambda full: (full, lambda: after(full)))
        casts, split, amax = self.casts, self._output_split(axes), self._amax(axes, dy, "gradient")

        def complete(full: Tensor, product: Callable[[], Tensor]) -> tuple[Operand, Tensor]:
            dx = product()
            if casts is None:
                return full, dx
            return casts.cast(full, "gradient", self.name, split, rows=False, amax=amax), dx

        found = self._multiply_gathered(axes, dy, "gradient", split, amax=amax)
        return found.then(lambda both: (plain(both[0]), lambda: complete(plain(both[0]), both[1])))

    def forward_scattered(self, axes: Axes, x: Operand, plus: Tensor | None = None) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, N] of the sum, over the tp ranks, of a row-parallel product and `plus` [T, N],
        which may be overwritten."""
        return self._multiply_scattered(axes, _rows_of(x), "activation", plus)

    def input_grad_scattered(self, axes: Axes, dy: Operand, plus: Tensor | None = None) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, K] of the sum, over the tp ranks, of a column-parallel product and `plus` [T, K],
        which may be overwritten."""
        return self._multiply_scattered(axes, _rows_of(dy), "gradient", plus)

    def wgrad(self, dy: Operand, x: Operand) -> LinearWgrad:
        if isinstance(dy, Fp8Forms) and isinstance(x, Fp8Forms):
            return LinearWgrad(self.gradient, _given(dy.columns), _given(x.columns))
        assert isinstance(dy, Tensor) and isinstance(x, Tensor)
        return LinearWgrad(self.gradient, dy, x)

    def _overlaps(self, axes: Axes, x: Operand) -> bool:
        """Whether rows are multiplied while others arrive; in 8 bits, only whole tiles are."""
        own = x if isinstance(x, Tensor) else _given(x.rows).values
        return axes.tp.overlaps(len(own), own.numel(), own) and (self.casts is None or len(own) % TILE == 0)

    def _amax(self, axes: Axes, x: Operand, role: Role) -> Tensor | None:
        """The maximum that scales all rows of x, some of which this rank has; None if they already have scales, or
        tiles have their own."""
        if self.casts is None or not isinstance(x, Tensor):
            return None
        return self.casts.amax(x, role, self.name, SplitOver(axes.cp, axes.tp))

    def _multiply_gathered(
        self,
        axes: Axes,
        x: Operand,
        role: Role,
        split: SplitOver,
        bias: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        keep: bool = True,
    ) -> AsyncResult[tuple[Operand, Callable[[], Tensor]]]:
        """(all rows of x, a function that completes their product), in tiles of rows, which are cast as they are
        multiplied."""
        matrix, values = self._matrix(axes, role), x if isinstance(x, Tensor) else _given(x.rows).values

        def product(operand: Operand, rows: slice, out: Tensor) -> None:
            if isinstance(operand, Tensor) and self.casts is not None:
                cast = self.casts.cast(operand[rows], role, self.name, split, columns=False, amax=amax)
                self._multiply(role, _rows_of(cast), matrix, bias, out)
            else:
                self._multiply(role, part(_rows_of(operand), rows), matrix, bias, out)

        gathered = gather(axes, x, keep=keep)
        y = values.new_empty(axes.tp.size * len(values), self._width(role), dtype=self.dtype)
        return axes.tp.multiply_gathered(gathered, x, y, product)

    def _multiply_scattered(self, axes: Axes, x: RowOperand, role: Role, plus: Tensor | None) -> AsyncResult[Tensor]:
        matrix, like = self._matrix(axes, role), x if isinstance(x, Tensor) else x.values.new_empty(0, dtype=self.dtype)
        shape = len(x if isinstance(x, Tensor) else x.values), self._width(role)

        def product(rows: slice, out: Tensor) -> None:
            if plus is None:
                self._multiply(role, part(x, rows), matrix, out=out)
            else:
                self._add_product_(role, part(x, rows), matrix, out.copy_(plus[rows]))

        rows = shape[0] // axes.tp.size
        if axes.tp.overlaps(rows, math.prod(shape), like) and (self.casts is None or rows % TILE == 0):
            return axes.tp.multiply_scattered(shape, like, product)
        if plus is not None:
            return axes.tp.reduce_scatter(self._add_product_(role, x, matrix, plus))
        if isinstance(x, Tensor) and isinstance(matrix, Tensor):
            return axes.tp.matmul_reduce_scatter(x, matrix)
        return axes.tp.reduce_scatter(self._multiply(role, x, matrix))

    def _add_product_(self, role: Role, x: RowOperand, matrix: RowOperand, y: Tensor) -> Tensor:
        if isinstance(x, Tensor) and isinstance(matrix, Tensor) and role == "gradient":
            return y.addmm_(x, matrix)  # rounded once
        return y.add_(self._multiply(role, x, matrix))

    def _multiply(
        self, role: Role, x: RowOperand, matrix: RowOperand, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(x, Fp8Tensor) and isinstance(matrix, Fp8Tensor):
            self._sample(role, x)
            y = fp8_gemm(x, matrix, self.dtype, out)
            return y if bias is None else y.add_(bias)
        left, right = plain(x), plain(matrix)
        return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)

    def _matrix(self, axes: Axes, role: Role) -> RowOperand:
        """The matrix that activations [.., K] or gradients [.., N] are multiplied by; transposed in 8 bits."""
        is_backward = role == "gradient"
        if self.casts is None:
            return self.weight if is_backward else self.weight.t()
        forms = self._forms(axes, columns=is_backward)
        if not is_backward:
            self._sample("weight", _given(forms.rows))
        return _given(forms.columns if is_backward else forms.rows)

    def _width(self, role: Role) -> int:
        """The width of the product: N in F, K in B."""
        return self.weight.shape[role == "gradient"]

    def _sample(self, role: Role, operand: Fp8Tensor) -> None:
        if self.casts is not None and self.casts.samples is not None:
            self.casts.samples.add(self.name, role, operand)

    def _input_split(self, axes: Axes) -> SplitOver:
        return SplitOver(axes.cp, axes.tp if self.row_parallel else RowGroup())

    def _output_split(self, axes: Axes) -> SplitOver:
        return SplitOver(axes.cp, RowGroup() if self.row_parallel else axes.tp)

    def _forms(self, axes: Axes, *, columns: bool) -> Fp8Forms:
        """The form by rows and, with `columns`, the other one, which a cast makes anyway."""
        assert self.casts is not None
        if self.param.scales is not None:
            return self.casts.gathered(self.weight, self.param.scales, columns=columns)
        split = SplitOver(features=axes.tp) if self.row_parallel else SplitOver(tokens=axes.tp)
        return self.casts.weight(self.weight, split)


def gather(axes: Axes, x: Operand, *, keep: bool = True) -> AsyncResult[Operand]:
    """All rows of an operand split over the tp ranks; unless `keep`, this rank's may be missing."""
    return axes.tp.all_gather(x, keep=keep) if isinstance(x, Tensor) else gather_forms(axes.tp, x, keep=keep)


def part(x: RowOperand, rows: slice) -> RowOperand:
    """Some rows of an operand."""
    return x[rows] if isinstance(x, Tensor) else x.part(rows)


def plain(x: Operand | RowOperand) -> Tensor:
    """Asserts that an operand is not in 8 bits, and returns it."""
    assert isinstance(x, Tensor)
    return x


def _given(form: Fp8Tensor | None) -> Fp8Tensor:
    assert form is not None
    return form


def _rows_of(x: Operand) -> RowOperand:
    """x as the left operand of a product."""
    return x if isinstance(x, Tensor) else _given(x.rows)
