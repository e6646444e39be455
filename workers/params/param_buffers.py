"""The full weights that a stage's layers read, and the full gradients that they add to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.params.buckets import GradientBucket, gradient_buckets
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.tp_replicated import ReplicatedGradients


@dataclass(frozen=True, eq=False)
class NamedBuffer:
    """A full flat buffer and the tensors in it by name. Equal only to itself, so it can be the key of what is derived
    from it."""

    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]


BoundBuffers = tuple[NamedBuffer | None, NamedBuffer | None]  # weights and gradients


class ParamBuffers:
    """The buffers of one kind of parameters of a stage (its experts, or all else).

    Under ZeRO stages share a few buffers: `weights` is None except between `set_weights` and `clear_weights`.
    """

    def __init__(self, parameters: Parameters, replicated: ReplicatedGradients, buckets: list[GradientBucket]) -> None:
        self.parameters, self.replicated, self.buckets = parameters, replicated, buckets
        self.weights: NamedBuffer | None = None
        self.gradients: NamedBuffer | None = None
        self.stale = False  # the gradients hold those of an earlier step or another stage
        self._named: dict[int, NamedBuffer] = {}  # by address
        if parameters.full_gradients is not None:
            self.set_gradients(parameters.full_gradients)
        if parameters.full_weights is not None:
            self.set_weights(parameters.full_weights)

    def set_gradients(self, flat: torch.Tensor) -> None:
        """Adds to the gradients in this buffer from now on. W zeroes it first where it is `stale`."""
        self.gradients = self._name(flat)

    def set_weights(self, flat: torch.Tensor) -> None:
        self.weights = self._name(flat)

    def clear_weights(self) -> None:
        self.weights = None

    @property
    def bound(self) -> BoundBuffers:
        return self.weights, self.gradients

    def zero_if_stale(self) -> None:
        """Called before a W adds to the gradients."""
        if self.stale and self.gradients is not None:
            self.gradients.flat.zero_()
            self.stale = False

    def _name(self, flat: torch.Tensor) -> NamedBuffer:
        """The same object whenever the same buffer comes again."""
        address = flat.data_ptr()
        if address not in self._named:
            self._named[address] = NamedBuffer(flat, self.parameters.views(flat))
        return self._named[address]


def make_param_buffers(
    plan: Plan, rank: int, stage: int, parameters: dict[ParamShard, Parameters]
) -> list[ParamBuffers]:
    """The buffers of a stage, from all parameters that a rank holds."""
    result = []
    for each in (parameters for shard, parameters in parameters.items() if shard.stage == stage):
        shapes = ((local.tensor, local.shape) for local in each.local_tensors)
        buckets = gradient_buckets(plan, stage, each.layout, shapes)
        result.append(ParamBuffers(each, ReplicatedGradients(plan, rank, each), buckets))
    return result
