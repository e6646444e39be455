"""Where a stage's layers read one kind of parameters and add up their gradients, as whole as a rank ever has them."""

from __future__ import annotations

import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.params.buckets import Bucket, buckets_of
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.tp_replicated import Copies


class ParamBuffers:
    """`weights` and `gradients` are views by name; there are no weights to read before `read` or after `forget` where
    stages take turns on a buffer."""

    def __init__(self, parameters: Parameters, copies: Copies, buckets: list[Bucket]) -> None:
        self.parameters, self.copies, self.buckets = parameters, copies, buckets
        self.whole: torch.Tensor | None = None
        self.stale = False
        self.made: dict[int, dict[str, torch.Tensor]] = {}  # views of the few buffers there are
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        if parameters.gradients is not None:
            self.accumulate_in(parameters.gradients)
        if parameters.weights is not None:
            self.read(parameters.weights)

    def accumulate_in(self, flat: torch.Tensor) -> None:
        """The whole gradients are in this buffer from here on; they begin with zeros at the first W of a step, and of
        every turn that it takes on the buffer."""
        self.whole = flat
        self.gradients = self._views(flat)

    def read(self, flat: torch.Tensor) -> None:
        """The whole weights are in this buffer from here on."""
        self.weights = self._views(flat)

    def forget(self) -> None:
        self.weights = {}

    def freshen(self) -> None:
        """Before a W adds to the gradients."""
        if self.stale and self.whole is not None:
            self.whole.zero_()
            self.stale = False

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        at = flat.data_ptr()
        if at not in self.made:
            self.made[at] = self.parameters.views(flat)
        return self.made[at]


def buffers_of(plan: Plan, rank: int, stage: int, parameters: dict[ParamShard, Parameters]) -> list[ParamBuffers]:
    """Those of a stage, from all that a rank holds."""
    found = []
    for held in (held for share, held in parameters.items() if share.stage == stage):
        buckets = buckets_of(plan, stage, held.cut, ((local.tensor, local.shape) for local in held.locals))
        found.append(ParamBuffers(held, Copies(plan, rank, held), buckets))
    return found
