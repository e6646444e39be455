"""How the flat buffers of a stage are divided: into buckets, reduced or gathered one by one, and those into shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pentad.schedules.spec.plan import Plan, aligned_part
from pentad.schedules.spec.tensors import Tensor

ShardIndex = tuple[int, slice]  # indexes a shard [buckets, part]: a bucket, and elements of the shard's part of it


class ZeroLayout(NamedTuple):
    """A stage's parameters end to end, `size` elements and zeros as padding, in equal `buckets`; each bucket is cut
    into `num_shards` equal parts, one of which is this shard's."""

    size: int
    num_shards: int = 1
    shard_index: int = 0
    buckets: int = 1

    @property
    def part(self) -> int:
        """Elements of a shard in one bucket."""
        return aligned_part(self.size, self.num_shards * self.buckets)

    @property
    def padded_size(self) -> int:
        return self.buckets * self.num_shards * self.part

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """The shard [buckets, part], a view of a full buffer [padded_size]."""
        return full.view(self.buckets, self.num_shards, self.part)[:, self.shard_index]

    def overlap(self, start: int, end: int) -> Iterator[tuple[ShardIndex, slice]]:
        """Where the shard holds elements `start` to `end` of a full buffer, and which, relative to `start`."""
        for bucket in range(self.buckets):
            own = (bucket * self.num_shards + self.shard_index) * self.part
            first, last = max(start, own), min(end, own + self.part)
            if first < last:
                yield (bucket, slice(first - own, last - own)), slice(first - start, last - start)


class GradientBucket(NamedTuple):
    """Elements `span` of a stage's full gradients, complete once a backward has reached `layer`; -1: at its end."""

    span: slice
    layer: int


def gradient_buckets(
    plan: Plan, stage: int, layout: ZeroLayout, shapes: Iterable[tuple[Tensor, tuple[int, ...]]]
) -> list[GradientBucket]:
    """The buckets that the program reduces for a stage, from its tensors and their local shapes in buffer order."""
    count = plan.program.buckets[stage]
    size, start = aligned_part(layout.padded_size, count), 0
    layers = [plan.model.layers] * count
    for tensor, shape in shapes:
        end = start + math.prod(shape)
        for bucket in range(start // size, -(-end // size)):
            layers[bucket] = min(layers[bucket], _layer_of(tensor, plan.model.layers))
        start = end
    ends = [min((bucket + 1) * size, layout.padded_size) for bucket in range(count)]
    return [GradientBucket(slice(bucket * size, end), layers[bucket]) for bucket, end in enumerate(ends)]


def _layer_of(tensor: Tensor, layers: int) -> int:
    """The layer at which a backward completes a tensor's gradient: it starts with all that follows the last layer."""
    if tensor.name == "embedding":
        return -1
    prefix, _, rest = tensor.name.partition(".")
    return min(int(rest.partition(".")[0]), layers) if prefix == "layers" else layers
