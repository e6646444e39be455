"""An embedding that the last stage has as well, as its head or for layers that predict further tokens: each has a copy,
and both step on the sum of their gradients.

The sum is taken where all else is summed already, just before the step's norm, in which it counts once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.params.buckets import Place
from pentad.workers.params.param_buffers import ParamBuffers


class Copy(NamedTuple):
    """What a rank's shard has of one of the two tensors: `mine` of its gradients are `place` of the tensor's. It
    `gives` them where no other rank does."""

    gradient: torch.Tensor
    mine: Place
    place: slice
    gives: bool


class Tied:
    """The copies of a rank; `group` are the ranks of its tensor coordinate that have one of either."""

    def __init__(
        self, plan: Plan, rank: int, stages: dict[int, StageProtocol], group: dist.ProcessGroup | None
    ) -> None:
        self.group, self.found, self.size = group, list[Copy](), 0
        for share in plan.shares_of(rank) if plan.is_tied else ():
            if not share.experts and share.stage in (0, plan.program.stages - 1):
                bank = stages[share.stage].banks[0]
                gives = bank.parameters.cut.parts > 1 or plan.owner(share) == rank
                self._add(bank, gives)

    def _add(self, bank: ParamBuffers, gives: bool) -> None:
        parameters = bank.parameters
        for local in parameters.locals:
            if "embedding" in (local.name, local.tensor.like):
                self.size, self.gradient = math.prod(local.shape), parameters.gradient
        for local, mine, span in parameters.places():
            if "embedding" in (local.name, local.tensor.like):
                self.found.append(Copy(parameters.gradient, mine, span, gives))

    def reduce(self) -> None:
        """Makes both gradients their sum."""
        if not self.size:
            return
        joint = self.gradient.new_zeros(self.size)
        for copy in self.found:
            if copy.gives:
                joint[copy.place] += copy.gradient[copy.mine]
        dist.all_reduce(joint, group=self.group)
        for copy in self.found:
            copy.gradient[copy.mine] = joint[copy.place]
