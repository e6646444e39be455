"""How ZeRO divides the flat buffers of a stage into shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pentad.schedules.spec.lora import LoraSpec, shard_size, shard_tensors
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard, Plan, aligned_part
from pentad.schedules.spec.tensors import TILE_ELEMENTS, LayerRange, gathered_in_8_bits

INBOX_ELEMENTS = 2**25  # of gradients under way between peers, or in bfloat16 between any ranks, at most


class Segment(NamedTuple):
    """Parameters `start` to `end` of a stage, which are cut separately: `own` are the elements of a shard that are its
    part of the segment, `full` the elements of a full buffer that are the parts of all shards."""

    start: int
    end: int
    own: slice
    full: slice


class ZeroLayout(NamedTuple):
    """A stage's parameters end to end, `size` elements, in `num_shards` equal parts: a shard is part `shard_index`.

    The last `in_8_bits` of them, which are gathered in 8 bits, are cut separately: a shard has its part of all others,
    then its part of these; a full buffer has all parts of the others, then all parts of these. Both are padded with
    zeros at their end."""

    size: int
    num_shards: int = 1
    shard_index: int = 0
    in_8_bits: int = 0

    @property
    def compute_part(self) -> int:
        """Elements of a shard that are gathered in the dtype of compute."""
        return aligned_part(self.size - self.in_8_bits, self.num_shards)

    @property
    def part(self) -> int:
        """Elements of a shard."""
        return self.compute_part + aligned_part(self.in_8_bits, self.num_shards, TILE_ELEMENTS)

    @property
    def padded_size(self) -> int:
        return self.num_shards * self.part

    def gathered_size(self, itemsize: int) -> int:
        """Elements, of `itemsize` bytes, that full weights take."""
        return self.num_shards * (self.compute_part + (self.part - self.compute_part) // itemsize)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that have elements."""
        first, part, count, border = self.compute_part, self.part, self.num_shards, self.size - self.in_8_bits
        both = (
            Segment(0, border, slice(0, first), slice(0, count * first)),
            Segment(border, self.size, slice(first, part), slice(count * first, count * part)),
        )
        return tuple(each for each in both if each.start < each.end)

    def overlap(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Where the shard holds parameters `start` to `end`, and which, relative to `start`; nothing if it has none of
        them."""
        for segment in self.segments:
            begin, length = self._part_of(segment)
            first, last = max(start, begin), min(end, begin + length)
            if first < last:
                at = segment.own.start - begin
                yield slice(first + at, last + at), slice(first - start, last - start)

    def padding(self) -> Iterator[slice]:
        """The elements of the shard that hold no parameters."""
        for segment in self.segments:
            end = segment.own.start + self._part_of(segment)[1]
            if end < segment.own.stop:
                yield slice(end, segment.own.stop)

    def place(self, start: int) -> int:
        """Where a full buffer has parameter `start`."""
        segment = next(each for each in self.segments if start < each.end)
        return segment.full.start + start - segment.start

    def _part_of(self, segment: Segment) -> tuple[int, int]:
        """The first parameter of the shard's part, and how many there are."""
        size = segment.own.stop - segment.own.start
        begin = segment.start + self.shard_index * size
        return begin, max(0, min(size, segment.end - begin))


def zero_groups(plan: Plan, shard: ParamShard) -> list[tuple[int, ...]]:
    """The holders of a parameter shard, in groups over which its state is cut: each alone if it is not cut."""
    holders, size = plan.holders(shard), plan.num_zero_shards(shard)
    return [holders[first : first + size] for first in range(0, len(holders), size)]


def replica_groups(plan: Plan, shard: ParamShard) -> list[tuple[int, ...]]:
    """The holders of a parameter shard by the part of its state that they have, in the order of parts."""
    return list(zip(*zero_groups(plan, shard), strict=True))


def zero_group(plan: Plan, shard: ParamShard, rank: int) -> tuple[int, ...]:
    """The holders, a rank among them, that together have one copy of the state of a parameter shard."""
    return next(group for group in zero_groups(plan, shard) if rank in group)


def replicas(plan: Plan, shard: ParamShard, rank: int) -> tuple[int, ...]:
    """The holders that have the same part of the state of a parameter shard as a rank."""
    return next(group for group in replica_groups(plan, shard) if rank in group)


def zero_layout(plan: Plan, shard: ParamShard, rank: int) -> ZeroLayout:
    """How a parameter shard is cut over its holders."""
    found = first_layout(plan, shard)
    return found if found.num_shards == 1 else found._replace(shard_index=zero_group(plan, shard, rank).index(rank))


def first_layout(plan: Plan, shard: ParamShard) -> ZeroLayout:
    """The layout of the first holder; those of all others have the same sizes."""
    return ZeroLayout(plan.size(shard), plan.num_zero_shards(shard), in_8_bits=plan.size_in_8_bits(shard))


def pool_sizes(
    model: ModelSpec,
    lora: LoraSpec | None,
    layers: Sequence[LayerRange],
    mesh: Mesh,
    mirrors: int = 1,
    fp8: Fp8Spec | None = None,
    itemsize: int = 2,
    shards: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """The `sizes` of a Program whose units have these layers, each on `mirrors` ranks of a pipeline: the padded
    elements of a unit's parameter shards, of all but experts and of experts, and of the frozen ones of both. If some
    are gathered in 8 bits, trained weights count as the elements of `itemsize` bytes that they take, and their
    gradients follow. `shards` are the plan's `zero_shards`."""

    def layout(unit: LayerRange, *, experts: bool, frozen: bool = False) -> ZeroLayout:
        found = shard_tensors(model, lora, unit, experts=experts, frozen=frozen)
        count = shards or mirrors * mesh.dp * mesh.cp * (1 if experts else mesh.ep)
        names = gathered_in_8_bits(model, fp8, unit, experts=experts) if count > 1 else ()
        narrow = shard_size(tuple(each for each in found if each.name in names), mesh)
        return ZeroLayout(shard_size(found, mesh), count, in_8_bits=narrow)

    # those in 8 bits are not the same in all layers
    alike = [unit if fp8 is not None and fp8.gathers else _first_alike(model, unit) for unit in layers]
    different = dict.fromkeys(alike)
    trained = [[layout(unit, experts=experts) for unit in different] for experts in (False, True)]
    by_kind = [[each.gathered_size(itemsize) for each in kind] for kind in trained]
    for experts in (False, True):
        frozen = [lora and layout(unit, experts=experts, frozen=True) for unit in different]
        by_kind.append([each.padded_size if each else 0 for each in frozen])
    if any(each.in_8_bits for kind in trained for each in kind):
        by_kind += [[each.padded_size for each in kind] for kind in trained]
    sizes = dict(zip(different, zip(*by_kind, strict=True), strict=True))
    return tuple(sizes[unit] for unit in alike)


def _first_alike(model: ModelSpec, layers: LayerRange) -> LayerRange:
    """The first layers of the model whose tensors have the sizes of these."""
    if model.custom is not None or layers.first < model.dense_layers < layers.end:
        return layers
    first = model.dense_layers if layers.first >= model.dense_layers else 0
    return layers._replace(first=first, end=first + len(layers.numbers))


class Reduced(NamedTuple):
    """A parameter shard that is cut into `parts` parts of `part` elements; each part is on `replicas` ranks."""

    part: int
    parts: int
    replicas: int


def reduced_shards(plan: Plan, rank: int) -> list[Reduced]:
    counts = {shard: plan.num_zero_shards(shard) for shard in plan.param_shards_of(rank)}
    return [
        Reduced(plan.zero_shard_size(each), count, plan.num_holders(each) // count) for each, count in counts.items()
    ]


def inbox_elements(plan: Plan, rank: int) -> int:
    """Elements of a rank's inbox, in whose two halves the gradients of its peers arrive to be added."""
    return inbox_of(reduced_shards(plan, rank)) if plan.transport_along("dp") == "peer" else 0


def inbox_of(shards: Iterable[Reduced]) -> int:
    """Elements of an inbox for these shards."""
    return min(INBOX_ELEMENTS, max(((each.parts - 1) * max(2 * ALIGNMENT, each.part) for each in shards), default=0))


def outbox_elements(plan: Plan, rank: int) -> int:
    """Elements of a rank's outbox, in which its peers find its gradients in bfloat16; equal on all of them."""
    is_copied = plan.transport_along("dp") == "peer" and plan.bf16_reduce
    return outbox_of(reduced_shards(plan, rank)) if is_copied else 0


def outbox_of(shards: Iterable[Reduced]) -> int:
    """Elements of an outbox for these shards."""
    return min(INBOX_ELEMENTS, max((each.parts * each.part for each in shards if each.parts > 1), default=0))


def num_muon_elements(plan: Plan, shard: ParamShard, rank: int) -> int:
    """Elements of a rank's ZeRO shard that Muon updates: they have one moment, all others have two."""
    if plan.optimizer.name != "muon":
        return 0
    layout, end, found = zero_layout(plan, shard, rank), 0, 0
    for tensor in plan.tensors(shard):
        start, end = end, end + math.prod(tensor.local_shape(plan.mesh))
        if plan.optimizer.rule_of(tensor).method == "muon":
            found += sum(span.stop - span.start for _, span in layout.overlap(start, end))
    return found
