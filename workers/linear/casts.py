"""Operands in 8 bits (kernels/fp8): what a stage casts, and with what scales.

Blocks of 1 x 128 and 128 x 128 have their own scales, whichever rank holds them. The scale of a full row, column or
tensor is the same on all ranks that hold parts of it: they agree on its absolute maximum, so that any mesh computes
what one process would. T tokens, K features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_cast import fp8_cast, fp8_transpose
from pentad.kernels.fp8.fp8_glu import fp8_glu, fp8_glu_backward, glu_amax, glu_backward_amax
from pentad.kernels.fp8.fp8_norm import fp8_normed, fp8_rms_norm, rms_norm_amax
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Fp8Tensor, Recipe, Role, absolute_maximum
from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.schedules.ir.errors import PentadError
from pentad.workers.linear.amax_history import AmaxHistory
from pentad.workers.linear.amax_history import Operand as DelayedOperand
from pentad.workers.linear.fp8_samples import Fp8Samples, PendingSamples
from pentad.workers.parallel.row_exchange import RowGroup

Operand = Tensor | Fp8Forms
RowOperand = Tensor | Fp8Tensor  # for experts: rows [T, K] with 1 x 128 scales, or in the compute dtype


class SplitOver(NamedTuple):
    """The ranks over which an operand [T, K] is split."""

    tokens: RowGroup = RowGroup()
    features: RowGroup = RowGroup()

    def amax(self, x: Tensor, recipe: Recipe, *, rows: bool, columns: bool) -> Amax | None:
        """The absolute maxima by which the recipe scales rows and columns of the full operand; None if its tiles are
        local."""
        if recipe.scaling == "block":
            return None
        none = x.new_empty(0, 1, dtype=torch.float32)
        return Amax(
            self.features.maximum(_maxima(x, 1)).wait() if rows else none,
            self.tokens.maximum(_maxima(x, 0)).wait() if columns else none,
        )

    def whole(self, amax: Tensor) -> Tensor:
        """The absolute maximum [1, 1] of the full tensor, from that of this rank's part."""
        return self.features.maximum(self.tokens.maximum(amax).wait()).wait()


class NormedSaved(NamedTuple):
    """What B needs of a norm that casts."""

    stream: Tensor  # [T, H], what was normed
    rstd: Tensor  # [T]
    amax: Tensor | None  # [1, 1], scales the normed rows; None with delayed scaling, where the history has it


class Casts:
    """The casts of a stage. Its 8-bit weights are kept until `weights_changed`; `samples` are those of the current
    step, if it is sampled. With a `history`, scaling is delayed. `name` always is the parameter whose product reads the
    operand."""

    def __init__(
        self, recipe: Recipe, device: torch.device, dtype: torch.dtype, history: AmaxHistory | None = None
    ) -> None:
        """`dtype` is the compute dtype."""
        require_units(recipe, device)
        assert history is None or recipe.scaling == "tensor"
        self.recipe, self.history, self.dtype = recipe, history, dtype
        self.samples: Fp8Samples | None = None
        self._weights: dict[int, Fp8Forms] = {}  # by address

    def begin_step(self, samples: Fp8Samples | None) -> None:
        self.samples = samples
        if self.history is not None:
            self.history.begin_step()

    def weights_changed(self) -> None:
        self._weights.clear()

    def take_samples(self) -> PendingSamples | None:
        """What a sampled step has counted so far; later products are not counted."""
        samples, self.samples = self.samples, None
        if samples is not None and self.history is not None:
            samples.replace_maxima({key: each.maxima for key, each in self.history.operands.items()})
        return None if samples is None else samples.take()

    def weight(self, weight: Tensor, split: SplitOver) -> Fp8Forms:
        """Both forms of a matrix [N, K]; `split.tokens` are the ranks that split N."""
        key = weight.data_ptr()
        if key not in self._weights:
            self._weights[key] = self.cast(weight, "weight", "", split)
        return self._weights[key]

    def gathered(self, values: Tensor, scales: Tensor, *, columns: bool) -> Fp8Forms:
        """A matrix that was gathered in 8 bits, by rows and, if asked for, by `columns`: transposing the matrix turns
        scales of 128 x 128 blocks or of the full matrix into those of its columns."""
        key = values.data_ptr()
        if not columns:
            return Fp8Forms(Fp8Tensor(values, scales), None)
        if key not in self._weights:
            transposed = Fp8Tensor(fp8_transpose(values), scales.contiguous().t())
            self._weights[key] = Fp8Forms(Fp8Tensor(values, scales), transposed)
        return self._weights[key]

    def cast(
        self,
        x: Tensor,
        role: Role,
        name: str,
        split: SplitOver,
        *,
        rows: bool = True,
        columns: bool = True,
        amax: Tensor | None = None,
    ) -> Fp8Forms:
        """Casts x; a given `amax` is that of a tensor of which x is a part."""
        x, delayed = x.contiguous(), self._delayed(name, role)
        if amax is None:
            amax = self.amax(x, role, name, split)
        given = split.amax(x, self.recipe, rows=rows, columns=columns) if amax is None else twice(amax)
        maxima = delayed.maxima if delayed is not None and self.is_known and rows else None
        return fp8_cast(x, self.recipe, role, given, rows=rows, columns=columns, maxima=maxima)

    def amax(self, x: Tensor, role: Role, name: str, split: SplitOver) -> Tensor | None:
        """[1, 1]: the maximum that scales the operand of which x is this rank's part; None if tiles have their own
        scales."""
        if self.recipe.scaling != "tensor":
            return None
        delayed = self._delayed(name, role)
        if delayed is not None and self.is_known:
            return delayed.amax
        return self._measured(delayed, absolute_maximum(x), split)

    def rows(self, x: Tensor, role: Role) -> Fp8Tensor:
        """x [T, K] by rows, with block scales."""
        assert self.recipe.scaling == "block"
        found = fp8_cast(x.contiguous(), self.recipe, role, columns=False).rows
        assert found is not None
        return Fp8Tensor(found.values, found.scales.contiguous())

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        name: str,
        split: SplitOver,
    ) -> tuple[Fp8Forms, NormedSaved]:
        """(the form by rows, what B needs) of the normed sum [T, H]. Not for row scaling."""
        delayed = self._delayed(name, "activation")
        if self.recipe.scaling == "block" or self.is_known:
            given = (None, None) if delayed is None else delayed
            rows, stream, rstd = fp8_rms_norm(x, weight, eps, self.recipe, given[0], residual, offset, given[1])
            return Fp8Forms(rows, None), NormedSaved(stream, rstd, None)
        found, stream, rstd = rms_norm_amax(x, weight, eps, residual, offset)
        amax = self._measured(delayed, found, split)
        forms = fp8_normed(stream, weight, rstd, self.recipe, twice(amax), offset, columns=False)
        return forms, NormedSaved(stream, rstd, amax)

    def normed_again(
        self, saved: NormedSaved, weight: Tensor, offset: float, name: str, *, rows: bool, columns: bool
    ) -> Fp8Forms:
        delayed, amax = self._delayed(name, "activation"), saved.amax
        if amax is None and delayed is not None:
            amax = delayed.amax
        given = None if amax is None else twice(amax)
        return fp8_normed(saved.stream, weight, saved.rstd, self.recipe, given, offset, rows=rows, columns=columns)

    def glu(self, gate_up: Tensor, act: Activation, name: str, split: SplitOver) -> Fp8Forms:
        """The form by rows of the unit's result [T, I]."""
        if self.recipe.scaling == "row":
            return self.cast(glu(gate_up, act), "activation", name, split, columns=False)
        delayed = self._delayed(name, "activation")
        if delayed is not None and self.is_known:
            return Fp8Forms(fp8_glu(gate_up, self.recipe, act, *delayed), None)
        is_block = self.recipe.scaling == "block"
        amax = None if is_block else self._measured(delayed, glu_amax(gate_up, act), split)
        return Fp8Forms(fp8_glu(gate_up, self.recipe, act, amax), None)

    def glu_backward(
        self, dy: Tensor, gate_up: Tensor, act: Activation, name: str, before: str, split: SplitOver
    ) -> tuple[Fp8Forms, Fp8Forms]:
        """(both forms of the gradient [T, 2I], the form by columns of the result [T, I]). The gradient is read by
        products with the parameter `before`."""
        if self.recipe.scaling == "row":
            dgate_up, y = glu_backward(dy, gate_up, act)
            gradients = self.cast(dgate_up, "gradient", before, split)
            return gradients, self.cast(y, "activation", name, split, rows=False)
        amax, maxima = None, None
        gradient, result = self._delayed(before, "gradient"), self._delayed(name, "activation")
        if gradient is not None and result is not None and self.is_known:
            amax, maxima = (twice(gradient.amax), result.amax), gradient.maxima
        elif self.recipe.scaling == "tensor":
            of_gradient, of_y = glu_backward_amax(dy, gate_up, act)
            amax = twice(self._measured(gradient, of_gradient, split)), self._measured(result, of_y, split)
        forms, columns = fp8_glu_backward(dy, gate_up, self.recipe, act, amax, maxima)
        return forms, Fp8Forms(None, columns)

    @property
    def is_known(self) -> bool:
        """Whether all activations and gradients are scaled by maxima of the previous step."""
        return self.history is not None and self.history.is_known

    def _delayed(self, name: str, role: Role) -> DelayedOperand | None:
        """None with current scaling, which weights always have."""
        return None if self.history is None or role == "weight" else self.history.operands[name, role]

    def _measured(self, delayed: DelayedOperand | None, amax: Tensor, split: SplitOver) -> Tensor:
        """The maximum [1, 1] that scales an operand of which this rank's part has the absolute maximum `amax` [1,
        1]."""
        if delayed is not None:
            delayed.measured(amax)
        whole = split.whole(amax)
        return whole if delayed is None else delayed.amax_or(whole)


def require_units(recipe: Recipe, device: torch.device) -> None:
    """Raises PentadError for a GPU that cannot multiply with this recipe; CPUs emulate all recipes."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9) or (recipe.scaling == "block" and capability != (9, 0)):
        found = f"precision.matmul is fp8-{recipe.scaling} on {torch.cuda.get_device_name(device)}"
        other = "compute, fp8-tensor or fp8-row" if capability >= (8, 9) else "compute"
        raise PentadError(f"{found}, which has no such products: expected precision.matmul = {other}")


def twice(amax: Tensor) -> Amax:
    """The maxima of both forms of a tensor with one scale."""
    return Amax(amax, amax)


def _maxima(x: Tensor, dim: int) -> Tensor:
    """The absolute maxima of x along a dimension, float32, as one column."""
    return torch.linalg.vector_norm(x, torch.inf, dim=dim)[:, None].float()
