"""The full weights that a stage's layers read, and the full gradients that they add to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pentad.schedules.spec.plan import ParamShard, Plan, aligned_part
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.tp_replicated import ReplicatedGradients
from pentad.workers.params.weight_shard import WeightShard


@dataclass(frozen=True, eq=False)
class NamedBuffer:
    """A full flat buffer and the tensors in it by name. Equal only to itself, so it can be the key of what is derived
    from it."""

    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]


BoundBuffers = tuple[NamedBuffer | None, NamedBuffer | None]  # weights and gradients


class GradientBucket(NamedTuple):
    """Elements `span` of a stage's full gradients, complete once a backward has reached `layer`; -1: at its end."""

    span: slice
    layer: int


class WeightBuffer:
    """The full weights of one kind of a stage (its experts, or all else); by themselves those that LoRA freezes.

    Under ZeRO stages share a few buffers: `weights` is None except between `set_weights` and `clear_weights`.
    """

    def __init__(self, shard: WeightShard) -> None:
        self.shard = shard
        self.weights: NamedBuffer | None = None
        self._named: dict[int, NamedBuffer] = {}  # by address
        if shard.full_weights is not None:
            self.set_weights(shard.full_weights)

    def set_weights(self, flat: torch.Tensor) -> None:
        self.weights = self._name(flat)

    def clear_weights(self) -> None:
        self.weights = None

    def _name(self, flat: torch.Tensor) -> NamedBuffer:
        """The same object whenever the same buffer comes again."""
        address = flat.data_ptr()
        if address not in self._named:
            self._named[address] = NamedBuffer(flat, self.shard.views(flat))
        return self._named[address]


class ParamBuffers(WeightBuffer):
    """The full weights and gradients of one kind of parameters of a stage."""

    def __init__(self, parameters: Parameters, replicated: ReplicatedGradients, buckets: list[GradientBucket]) -> None:
        super().__init__(parameters)
        self.parameters, self.replicated, self.buckets = parameters, replicated, buckets
        self.gradients: NamedBuffer | None = None
        self.stale = False  # the gradients hold those of an earlier step or another stage
        if parameters.full_gradients is not None:
            self.set_gradients(parameters.full_gradients)

    def set_gradients(self, flat: torch.Tensor) -> None:
        """Adds to the gradients in this buffer from now on. W zeroes it first where it is `stale`."""
        self.gradients = self._name(flat)

    @property
    def bound(self) -> BoundBuffers:
        return self.weights, self.gradients

    def zero_if_stale(self) -> None:
        """Called before a W adds to the gradients."""
        if self.stale and self.gradients is not None:
            self.gradients.flat.zero_()
            self.stale = False


def make_param_buffers(
    plan: Plan, rank: int, stage: int, parameters: dict[ParamShard, Parameters]
) -> list[ParamBuffers]:
    """The buffers of a stage, from all parameters that a rank holds."""
    return [
        ParamBuffers(each, ReplicatedGradients(plan, rank, each), _gradient_buckets(plan, stage, each))
        for shard, each in parameters.items()
        if shard.stage == stage
    ]


def _gradient_buckets(plan: Plan, stage: int, parameters: Parameters) -> list[GradientBucket]:
    """The buckets that the program reduces for a stage."""
    count, padded_size = plan.program.buckets[stage], parameters.layout.padded_size
    size, layers = aligned_part(padded_size, count), [plan.model.layers] * count
    for local, start, end in parameters.spans():
        for bucket in range(start // size, -(-end // size)):
            layers[bucket] = min(layers[bucket], _layer_of(local.name, plan.model.layers))
    ends = [min((bucket + 1) * size, padded_size) for bucket in range(count)]
    return [GradientBucket(slice(bucket * size, end), layers[bucket]) for bucket, end in enumerate(ends)]


def _layer_of(name: str, layers: int) -> int:
    """The layer at which a backward completes a tensor's gradient: it starts with all that follows the last layer."""
    if name == "embedding":
        return -1
    prefix, _, rest = name.partition(".")
    return min(int(rest.partition(".")[0]), layers) if prefix == "layers" else layers
