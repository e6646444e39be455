"""The matrices of experts and their products: in the compute dtype or, with casts, in 8 bits.

Rows are sorted by expert (kernels/moe). In 8 bits, tokens have a scale for each 1 x 128 values, whichever rank holds
them; they are sent with their scales, and products read a token's row once for each of its experts. T tokens, R rows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_expert_glu import fp8_weighted_glu, fp8_weighted_glu_backward
from pentad.kernels.fp8.fp8_grouped import ExpertMatrices, fp8_grouped_gemm
from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Role
from pentad.kernels.glu import Activation
from pentad.kernels.moe import moe_permute
from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.moe.moe_permute import ExpertRows, gather_rows
from pentad.workers.linear.casts import Casts, RowOperand, SplitOver
from pentad.workers.linear.weight_grad import GroupedWgrad, Param, Params
from pentad.workers.parallel.async_ops import AsyncResult, gather2


class GroupedLinear(NamedTuple):
    """Matrices [local, N, K]; `name` is the parameter's name."""

    param: Param
    casts: Casts | None = None
    name: str = ""

    @classmethod
    def bind(cls, params: Params, name: str, casts: Casts | None) -> GroupedLinear:
        return cls(params[name], casts, name)

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

    def forward(self, x: RowOperand, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        """[R, N], from the rows `index` of x [.., K]."""
        if isinstance(x, Fp8Tensor):
            return fp8_grouped_gemm(x, self._matrices().rows, offsets, self.dtype, index)
        assert index is None
        return grouped_gemm(x, self.weight, offsets)

    def input_grad(self, dy: RowOperand, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        """[R, K], from the rows `index` of dy [.., N]."""
        if isinstance(dy, Fp8Tensor):
            return fp8_grouped_gemm(dy, self._matrices().columns, offsets, self.dtype, index)
        assert index is None
        return grouped_gemm(dy, self.weight.transpose(1, 2), offsets)

    def wgrad(
        self, dy: RowOperand, x: RowOperand, offsets: Tensor, dy_rows: Tensor | None, x_rows: Tensor | None
    ) -> GroupedWgrad:
        return GroupedWgrad(self.gradient, dy, x, offsets, dy_rows, x_rows, self.dtype)

    def _matrices(self) -> ExpertMatrices:
        assert self.casts is not None
        matrix, scales = self.weight.flatten(0, 1), self.param.scales
        forms = (
            self.casts.weight(matrix, SplitOver())
            if scales is None
            else self.casts.gathered(matrix, scales, columns=True)
        )
        if self.casts.samples is not None and forms.rows is not None:
            self.casts.samples.add(self.name, "weight", forms.rows)
        return ExpertMatrices.of(forms, self.weight.shape[0])


def operand(linear: GroupedLinear, x: Tensor, role: Role) -> RowOperand:
    """This rank's tokens [T, ..] as an operand of the experts' products with `linear`, before they are sent."""
    if linear.casts is None:
        return x
    found = linear.casts.rows(x, role)
    if linear.casts.samples is not None:
        linear.casts.samples.add(linear.name, role, found)
    return found


class SendsRows(Protocol):
    def dispatch(self, x: Tensor) -> AsyncResult[Tensor]: ...


def dispatch(dispatcher: SendsRows, x: RowOperand) -> AsyncResult[RowOperand]:
    """Sends tokens [T, ..] to the ranks of their experts; 8-bit tokens travel with their scales."""
    if isinstance(x, Tensor):
        return dispatcher.dispatch(x)
    sent = gather2(dispatcher.dispatch(x.values.view(torch.uint8)), dispatcher.dispatch(x.scales))
    return sent.then(lambda parts: Fp8Tensor(parts[0].view(x.values.dtype), parts[1]))


def gathered(x: RowOperand, rows: ExpertRows) -> tuple[RowOperand, Tensor | None]:
    """(an operand, the index of each row in it) for the rows of tokens x: products in 8 bits read tokens in place."""
    if isinstance(x, Fp8Tensor):
        return x, rows.tokens
    return gather_rows(x, rows.tokens, rows.offsets), None


def weighted_glu(casts: Casts | None, gate_up: Tensor, rows: ExpertRows, act: Activation) -> RowOperand:
    """Gated linear units [R, I] of gate_up [R, 2I] times the weights of the rows."""
    if casts is None:
        return moe_permute.weighted_glu(gate_up, rows.weights, rows.offsets, act)
    return fp8_weighted_glu(gate_up, rows.weights, rows.offsets, casts.recipe, act)


def weighted_glu_backward(
    casts: Casts | None, dy: Tensor, gate_up: Tensor, rows: ExpertRows, act: Activation
) -> tuple[RowOperand, RowOperand, Tensor]:
    """(dgate_up [R, 2I], y [R, I], dweights [R]) from dy [R, I]; y is recomputed."""
    if casts is None:
        return moe_permute.weighted_glu_backward(dy, gate_up, rows.weights, rows.offsets, act)
    return fp8_weighted_glu_backward(dy, gate_up, rows.weights, rows.offsets, casts.recipe, act)
