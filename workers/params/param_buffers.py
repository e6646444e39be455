"""The full weights that a stage's layers read, and the full gradients that they add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.tp_replicated import ReplicatedGradients
from pentad.workers.params.weight_shard import WeightShard


@dataclass(frozen=True, eq=False)
class NamedBuffer:
    """A full flat buffer and the tensors in it by name. Equal only to itself, so it can serve as the key of what is
    derived from it."""

    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]


Place = tuple[int, int]  # address and number of elements
BoundBuffers = tuple[NamedBuffer | None, NamedBuffer | None]  # weights and gradients


class Unwritten:
    """Main gradients that W has not written yet. Their contents are meaningless until the first product of a sum, which
    takes and overwrites them, so nothing has to zero them."""

    def __init__(self) -> None:
        self.tensors: dict[Place, torch.Tensor] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors.update((_place(tensor), tensor) for tensor in tensors)

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether to overwrite this tensor, or this view of all of it; from now on it counts as written."""
        return self.tensors.pop(_place(tensor), None) is not None

    def take_all(self) -> list[torch.Tensor]:
        """Takes the tensors that are left, to which nothing was added."""
        found, self.tensors = list(self.tensors.values()), {}
        return found


class WeightBuffer:
    """The full weights of one kind in a stage: its experts' or all others, those that LoRA freezes separately.

    Under ZeRO, stages share a few buffers: `weights` is None except between `set_weights` and `clear_weights`.
    """

    def __init__(self, shard: WeightShard) -> None:
        self.shard = shard
        self.weights: NamedBuffer | None = None
        self._named: dict[int, NamedBuffer] = {}  # by address
        if shard.full_weights is not None:
            self.set_weights(shard.full_weights)

    def set_weights(self, flat: torch.Tensor) -> None:
        self.weights = self._name(flat, self.shard.weight_views)

    def clear_weights(self) -> None:
        self.weights = None

    def _name(self, flat: torch.Tensor, views: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> NamedBuffer:
        """The same object for the same buffer."""
        address = flat.data_ptr()
        if address not in self._named:
            self._named[address] = NamedBuffer(flat, views(flat))
        return self._named[address]


class ParamBuffers(WeightBuffer):
    """The full weights and gradients of one kind of parameters in a stage."""

    def __init__(self, parameters: Parameters, replicated: ReplicatedGradients) -> None:
        super().__init__(parameters)
        self.parameters, self.replicated = parameters, replicated
        self.gradients: NamedBuffer | None = None
        self.stale = False  # the buffer still holds gradients of an earlier sum or another stage
        self.has_partial_sum = False  # the shard has the sum of the step's earlier microbatches
        if parameters.full_gradients is not None:
            self.set_gradients(parameters.full_gradients)

    def set_gradients(self, flat: torch.Tensor) -> None:
        """Accumulates gradients in this buffer from now on. If it is `stale`, W prepares it first."""
        self.gradients = self._name(flat, self.shard.views)

    @property
    def bound(self) -> BoundBuffers:
        return self.weights, self.gradients

    def begin_step(self) -> None:
        """Makes the next W begin a new sum."""
        self.stale, self.has_partial_sum = True, False

    def end_partial_sum(self) -> None:
        """Called when a REDUCE_SCATTER has moved the sum so far to the shard: the next W begins another sum."""
        self.stale = self.has_partial_sum = True

    def prepare_gradients(self, unwritten: Unwritten) -> None:
        """Called before a W adds to the gradients."""
        if self.stale and self.gradients is not None:
            for segment in self.parameters.layout.segments:
                self.gradients.flat[segment.full][segment.end - segment.start :].zero_()  # zero the padding
            unwritten.add(self.gradients.tensors.values())
            self.stale = False


def make_param_buffers(
    plan: Plan, rank: int, stage: int, parameters: dict[ParamShard, Parameters]
) -> list[ParamBuffers]:
    """The buffers of a stage, given all parameters that a rank holds."""
    return [
        ParamBuffers(each, ReplicatedGradients(plan, rank, each))
        for shard, each in parameters.items()
        if shard.stage == stage
    ]


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.numel()
