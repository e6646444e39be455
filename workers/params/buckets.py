"""How a stage's flat buffers are cut: into buckets, gathered and reduced one by one, and these into shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from pentad.schedules.spec.plan import Plan, part_of
from pentad.schedules.spec.tensors import Tensor

Place = tuple[int, slice]  # of a shard: the number of a bucket, and elements of its part of that


class Cut(NamedTuple):
    """A stage's parameters end to end, `size` of them and zeros that fill up the last ones, in equal `buckets`; each
    of these in `parts` equal parts, of which the shard has that of its `number`."""

    size: int
    parts: int = 1
    number: int = 0
    buckets: int = 1

    @property
    def part(self) -> int:
        """Elements of a bucket's part."""
        return part_of(self.size, self.parts * self.buckets)

    @property
    def whole(self) -> int:
        """Elements of a whole buffer."""
        return self.buckets * self.parts * self.part

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """[buckets, part] of a whole buffer, where it lies there."""
        return whole.view(self.buckets, self.parts, self.part)[:, self.number]

    def common(self, start: int, end: int) -> Iterator[tuple[Place, slice]]:
        """What the shard has of the elements `start` to `end` of a whole buffer: its place in the shard, and which
        those are, counted from `start`."""
        for bucket in range(self.buckets):
            own = (bucket * self.parts + self.number) * self.part
            first, last = max(start, own), min(end, own + self.part)
            if first < last:
                yield (bucket, slice(first - own, last - own)), slice(first - start, last - start)


class Bucket(NamedTuple):
    """Elements `span` of a stage's whole gradients. A backward pass that has come down to `layer` adds no more to them;
    -1: not before its end."""

    span: slice
    layer: int


def buckets_of(plan: Plan, stage: int, cut: Cut, shapes: Iterable[tuple[Tensor, tuple[int, ...]]]) -> list[Bucket]:
    """Those that the plan's program reduces of a stage, by number, from the tensors that its buffers consist of and
    their shapes there."""
    count = plan.program.buckets[stage]
    size, start = part_of(cut.whole, count), 0
    layers = [plan.model.layers] * count
    for tensor, shape in shapes:
        end = start + math.prod(shape)
        for number in range(start // size, -(-end // size)):
            layers[number] = min(layers[number], _layer_of(tensor, plan.model.layers))
        start = end
    ends = [min((number + 1) * size, cut.whole) for number in range(count)]
    return [Bucket(slice(number * size, end), layers[number]) for number, end in enumerate(ends)]


def _layer_of(tensor: Tensor, layers: int) -> int:
    """The layer that is done with a tensor's gradient; a backward pass begins with what is behind the last one."""
    if tensor.name == "embedding":
        return -1
    at, _, rest = tensor.name.partition(".")
    return min(int(rest.partition(".")[0]), layers) if at == "layers" else layers
