"""Operands in 8 bits (kernels/fp8): what a stage casts, and with what scales.

Blocks of 1 x 128 and 128 x 128 have scales of their own, whoever holds them. A scale of a whole row, column or tensor
is the same on all ranks that hold parts of it: they agree on its absolute maximum, so that any mesh computes what one
process does. T tokens, K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.fp8.fp8_cast import fp8_cast
from pentad.kernels.fp8.fp8_glu import fp8_glu, fp8_glu_backward, glu_amax, glu_backward_amax
from pentad.kernels.fp8.fp8_norm import fp8_normed, fp8_rms_norm, rms_norm_amax
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, Role, absolute_maximum
from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.schedules.ir.errors import PentadError
from pentad.workers.linear.fp8_samples import Fp8Samples, PendingSamples
from pentad.workers.parallel.async_ops import AsyncResult, LayerWork

Operand = Tensor | Fp8Forms
RowOperand = Tensor | Fp8Tensor  # of experts: rows [T, K] with scales for each 1 x 128, or in the compute dtype
Group = dist.ProcessGroup | None


class SplitOver(NamedTuple):
    """The ranks between which an operand [T, K] is cut."""

    tokens: Group
    features: Group

    def amax(self, x: Tensor, recipe: Recipe) -> Amax | None:
        """What the recipe scales x by, as of the whole operand; None: its tiles are local."""
        if recipe.scaling == "block":
            return None
        if recipe.scaling == "tensor":
            return self.whole(absolute_maximum(x))
        rows = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).float()
        columns = torch.linalg.vector_norm(x, torch.inf, dim=0)[:, None].float()
        return Amax(_largest(rows, [self.features]), _largest(columns, [self.tokens]))

    def whole(self, amax: Tensor) -> Amax:
        """That of the tensor [1, 1], from that of this rank's part."""
        amax = _largest(amax, self)
        return Amax(amax, amax)


class NormedSaved(NamedTuple):
    """What B needs of a norm that casts."""

    stream: Tensor  # [T, H], what was normed
    rstd: Tensor  # [T]
    amax: Tensor | None  # [1, 1] of the normed rows


class Casts:
    """The casts of a stage. Its weights in 8 bits are kept until `weights_changed`; `samples` are those of the current
    step, if it is sampled."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        require_units(recipe, device)
        self.recipe = recipe
        self.samples: Fp8Samples | None = None
        self._weights: dict[int, Fp8Forms] = {}  # by address

    def weights_changed(self) -> None:
        self._weights.clear()

    def take_samples(self) -> PendingSamples | None:
        """What a sampled step has counted; later products are not counted."""
        samples, self.samples = self.samples, None
        return None if samples is None else samples.take()

    def weight(self, weight: Tensor, split: SplitOver) -> Fp8Forms:
        """Both forms of a matrix [N, K]; `split.tokens` are the ranks that split N."""
        key = weight.data_ptr()
        if key not in self._weights:
            self._weights[key] = self.cast(weight, "weight", split)
        return self._weights[key]

    def cast(self, x: Tensor, role: Role, split: SplitOver, *, rows: bool = True, columns: bool = True) -> Fp8Forms:
        x = x.contiguous()
        return fp8_cast(x, self.recipe, role, split.amax(x, self.recipe), rows=rows, columns=columns)

    def rows(self, x: Tensor, role: Role) -> Fp8Tensor:
        """x [T, K] by rows, with scales of blocks."""
        assert self.recipe.scaling == "block"
        found = fp8_cast(x.contiguous(), self.recipe, role, columns=False).rows
        assert found is not None
        return Fp8Tensor(found.values, found.scales.contiguous())

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, split: SplitOver
    ) -> tuple[Fp8Forms, NormedSaved]:
        """(the form of rows, what B needs) of the normed sum [T, H]. Not for rows with scales of their own."""
        if self.recipe.scaling == "block":
            rows, stream, rstd = fp8_rms_norm(x, weight, eps, self.recipe, None, residual, offset)
            return Fp8Forms(rows, None), NormedSaved(stream, rstd, None)
        found, stream, rstd = rms_norm_amax(x, weight, eps, residual, offset)
        amax = split.whole(found)
        forms = fp8_normed(stream, weight, rstd, self.recipe, amax, offset, columns=False)
        return forms, NormedSaved(stream, rstd, amax.rows)

    def normed_again(self, saved: NormedSaved, weight: Tensor, offset: float, *, rows: bool, columns: bool) -> Fp8Forms:
        amax = None if saved.amax is None else Amax(saved.amax, saved.amax)
        return fp8_normed(saved.stream, weight, saved.rstd, self.recipe, amax, offset, rows=rows, columns=columns)

    def glu(self, gate_up: Tensor, act: Activation, split: SplitOver) -> Fp8Forms:
        """The form of rows of the unit's result [T, I]."""
        if self.recipe.scaling == "row":
            return self.cast(glu(gate_up, act), "activation", split, columns=False)
        amax = None if self.recipe.scaling == "block" else split.whole(glu_amax(gate_up, act)).rows
        return Fp8Forms(fp8_glu(gate_up, self.recipe, act, amax), None)

    def glu_backward(self, dy: Tensor, gate_up: Tensor, act: Activation, split: SplitOver) -> tuple[Fp8Forms, Fp8Forms]:
        """(both forms of the gradient [T, 2I], the form of columns of the result [T, I])."""
        if self.recipe.scaling == "row":
            dgate_up, y = glu_backward(dy, gate_up, act)
            return self.cast(dgate_up, "gradient", split), self.cast(y, "activation", split, rows=False)
        amax = None
        if self.recipe.scaling == "tensor":
            of_gradient, of_y = glu_backward_amax(dy, gate_up, act)
            amax = split.whole(of_gradient), split.whole(of_y).columns
        gradient, columns = fp8_glu_backward(dy, gate_up, self.recipe, act, amax)
        return gradient, Fp8Forms(None, columns)


def require_units(recipe: Recipe, device: torch.device) -> None:
    """Raises PentadError for a GPU that cannot multiply by this recipe; CPUs emulate all."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9) or (recipe.scaling == "block" and capability != (9, 0)):
        found = f"precision.matmul is fp8-{recipe.scaling} on {torch.cuda.get_device_name(device)}"
        other = "compute, fp8-tensor or fp8-row" if capability >= (8, 9) else "compute"
        raise PentadError(f"{found}, which has no such products: expected precision.matmul = {other}")


def _largest(amax: Tensor, groups: Sequence[Group]) -> Tensor:
    for group in groups:
        if group is not None:
            work = dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group, async_op=True)
            AsyncResult((LayerWork(work, group),), lambda: amax).wait()
    return amax
