"""How ZeRO divides the flat buffers of a stage into shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pentad.schedules.spec.lora import LoraSpec, shard_size, shard_tensors
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import ParamShard, Plan, aligned_part
from pentad.schedules.spec.tensors import LayerRange

INBOX_ELEMENTS = 2**25  # of gradients on their way between peers, or in bfloat16 between any ranks, at most


class ZeroLayout(NamedTuple):
    """A stage's parameters end to end, `size` elements and zeros as padding, in `num_shards` equal parts: a shard is
    part `shard_index`."""

    size: int
    num_shards: int = 1
    shard_index: int = 0

    @property
    def part(self) -> int:
        """Elements of a shard."""
        return aligned_part(self.size, self.num_shards)

    @property
    def padded_size(self) -> int:
        return self.num_shards * self.part

    def overlap(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Where the shard holds elements `start` to `end` of a full buffer, and which, relative to `start`; nothing if
        it has none of them."""
        own = self.shard_index * self.part
        first, last = max(start, own), min(end, own + self.part)
        if first < last:
            yield slice(first - own, last - own), slice(first - start, last - start)


def zero_layout(plan: Plan, shard: ParamShard, rank: int) -> ZeroLayout:
    """How a parameter shard is cut over its holders."""
    size, num_shards = plan.size(shard), plan.num_zero_shards(shard)
    if num_shards == 1:
        return ZeroLayout(size)
    return ZeroLayout(size, num_shards, plan.holders(shard).index(rank))


def pool_sizes(
    model: ModelSpec, lora: LoraSpec | None, layers: Sequence[LayerRange], mesh: Mesh, mirrors: int = 1
) -> tuple[tuple[int, ...], ...]:
    """The sizes of a Program whose units have these layers, each on this many ranks of a pipeline: the padded elements
    of a unit's parameter shards, of all but experts and of experts, and of the frozen ones of both."""

    def padded(unit: LayerRange, *, experts: bool, frozen: bool) -> int:
        if frozen and lora is None:
            return 0
        found = shard_tensors(model, lora, unit, experts=experts, frozen=frozen)
        holders = mirrors * mesh.dp * mesh.cp * (1 if experts else mesh.ep)
        return ZeroLayout(shard_size(found, mesh), holders).padded_size

    kinds = product((False, True), (False, True))
    by_kind = [[padded(unit, experts=experts, frozen=frozen) for unit in layers] for frozen, experts in kinds]
    return tuple(zip(*by_kind, strict=True))


def inbox_elements(plan: Plan, rank: int) -> int:
    """Elements of the memory of a rank in which the gradients of its peers arrive to be added."""
    if plan.transport_along("dp") != "peer":
        return 0
    arriving = ((plan.num_zero_shards(shard) - 1) * plan.zero_shard_size(shard) for shard in plan.param_shards_of(rank))
    return min(INBOX_ELEMENTS, max(arriving))


def outbox_elements(plan: Plan, rank: int) -> int:
    """Elements of the memory of a rank in which its peers find its gradients in bfloat16; equal on all of them."""
    if plan.transport_along("dp") != "peer" or not plan.bf16_reduce:
        return 0
    shards = [shard for shard in plan.param_shards_of(rank) if plan.num_zero_shards(shard) > 1]
    read = (plan.num_zero_shards(shard) * plan.zero_shard_size(shard) for shard in shards)
    return min(INBOX_ELEMENTS, max(read, default=0))


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
