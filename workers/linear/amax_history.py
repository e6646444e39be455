"""Delayed scaling (Transformer Engine's DelayedScaling, with a history of one step and no margin): an operand is scaled
by its absolute maximum in the previous step, so that a cast need not find its own maximum first.

The maximum is over all microbatches and all ranks that hold the layer. An operand without one is scaled by its current
maximum; one that was zero throughout a step keeps the earlier maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import MAXIMA, Role, record
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import fp8_matrices
from pentad.workers.parallel.async_ops import all_reduce_max_

ROLES: tuple[Role, ...] = ("activation", "gradient")  # weights are cast once a step, by their current maximum
Group = dist.ProcessGroup | None
PREFIX = "fp8_amax."  # for names in a checkpoint


class Operand(NamedTuple):
    """What a layer knows of an operand: its `amax` [1, 1] in the previous step, 0 for none, and `maxima` [MAXIMA], in
    which casts `record` theirs."""

    amax: Tensor
    maxima: Tensor

    def measured(self, amax: Tensor) -> None:
        """Records the absolute maximum [1, 1] of this rank's part."""
        record(amax, self.maxima)

    def amax_or(self, current: Tensor) -> Tensor:
        """[1, 1]: the maximum of the previous step or, if there is none, the current one."""
        return torch.where(self.amax > 0, self.amax, current)


class AmaxHistory:
    """The maxima of the operands of a stage's products with the matrices `names`.

    `values` [matrices, 2], float32, are the maxima of activations and of gradients, 0 for none. They are part of the
    training state and advance with the master weights. Casts read `used`, which with post-validation is as far ahead as
    the weights that layers read. `newest` are the maxima of the last step that reached NORM. All are the same on all
    ranks that hold the stage. The host need not know whether there are maxima; `is_known` only saves casts from
    computing current ones.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.values, self.used, self.newest = torch.zeros(3, len(self.names), len(ROLES), device=device)
        self.maxima = torch.zeros(len(self.names), len(ROLES), MAXIMA, device=device)
        self.is_known = False
        self.operands: dict[tuple[str, Role], Operand] = {
            (name, role): Operand(self.used[i : i + 1, j : j + 1], self.maxima[i, j])
            for i, name in enumerate(self.names)
            for j, role in enumerate(ROLES)
        }

    @classmethod
    def of(cls, plan: Plan, stage: int, device: torch.device) -> AmaxHistory | None:
        """The history of a stage; None if it has no operands with delayed scaling."""
        if plan.fp8 is None or not plan.fp8.delayed:
            return None
        layers = plan.layers[stage]
        matrices = fp8_matrices(plan.model, plan.fp8, layers.numbers, has_head=layers.has_head)
        names = [each.name for each in matrices]
        return cls(names, device) if names else None

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The values [2] of each matrix, by their names in a checkpoint."""
        return {f"{PREFIX}{name}": row for name, row in zip(self.names, self.values, strict=True)}

    def begin_step(self) -> None:
        """Waits for the last step as long as some operand has no maximum."""
        self.maxima.zero_()
        self.is_known = self.is_known or bool((self.values > 0).all())

    def look_ahead(self) -> None:
        """Lets casts use the newest maxima, as if their step were valid."""
        self.used.copy_(self._advanced())

    def advance(self, valid: Tensor) -> None:
        """Takes over the newest maxima if their step is `valid`, a scalar bool; casts then use the maxima of the last
        valid step."""
        self.values.copy_(torch.where(valid, self._advanced(), self.values))
        self.used.copy_(self.values)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Takes over saved values by name; missing ones become 0, no maximum."""
        for name, values in self.by_name.items():
            values.copy_(saved[name]) if name in saved else values.zero_()
        self.restored()

    def restored(self) -> None:
        """Call when the values have been replaced."""
        self.used.copy_(self.values)
        self.is_known = False

    def _advanced(self) -> Tensor:
        return torch.where((self.newest > 0) & self.newest.isfinite(), self.newest, self.values)


def reduce_maxima(histories: Sequence[tuple[AmaxHistory, Group]], tp_group: Group) -> None:
    """Computes the `newest` maxima of a complete step over the ranks that hold each history's stage: the group given
    with it, and the tp ranks. All of them must call this, with the stages in the same order."""
    by_group: dict[Group, list[AmaxHistory]] = {}
    for history, group in histories:
        torch.amax(history.maxima, 2, out=history.newest)
        by_group.setdefault(group, []).append(history)
    for group, found in by_group.items():
        all_reduce_max_([history.newest for history in found], group)
    all_reduce_max_([history.newest for history, _ in histories], tp_group)
