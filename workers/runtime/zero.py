"""ZeRO (arXiv 1910.02054) on one rank: full weights and gradients while they are used, shards otherwise.

Weights are all-gathered, and gradients reduce-scattered, over the holders of a stage (data-parallel replicas as well as
DualPipe's mirror ranks), or over groups of them (`Plan.zero_shards`), each of which has all shards. The last
REDUCE_SCATTER of a step then sums a shard's gradients over the groups (arXiv 2205.00119, section 3.4). The full buffers
that stages share (schedules/passes/zero_buffers.py) are allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.passes.zero_buffers import (
    TRAINED_KINDS,
    Pool,
    gradient_pool,
    longest,
    sharded_stages,
    weight_pool,
)
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.parallel.async_ops import Arrival, ContinuedWork, all_gather, all_reduce_max_
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params.fp8_shard import Fp8Shard
from pentad.workers.params.param_buffers import ParamBuffers, WeightBuffer
from pentad.workers.rank_waits import rank_waits
from pentad.workers.transport.group_collectives import GroupCollectives, begin_all_reduce
from pentad.workers.transport.peer_collectives import PeerCollectives, gradients_name, weights_name

Collectives = GroupCollectives | PeerCollectives
Group = dist.ProcessGroup | None
B = TypeVar("B", bound=WeightBuffer)


class ZeroShards:
    """Runs ALL_GATHER, FREE, REDUCE_SCATTER and ALL_REDUCE. A stage with a single holder is never sharded."""

    def __init__(self, plan: Plan, rank: int, stages: Mapping[int, BaseStage]) -> None:
        self.stages, program, pp = stages, plan.program, plan.mesh.coordinates(rank).pp
        self.trained = _by_stage(plan.param_shards_of(rank), {s: stage.param_buffers for s, stage in stages.items()})
        self.frozen = _by_stage(plan.frozen_shards_of(rank), {s: stage.frozen for s, stage in stages.items()})
        sharded = sharded_stages(program, pp) if plan.zero == 3 else set[int]()
        self.weight_pools = [weight_pool(each, pp, sharded) for each in plan.programs]
        held = next(iter(stages.values())).param_buffers[0].parameters
        self.weights = _allocate(self.weight_pools, held.compute)
        trained = plan.trained_programs
        self.gradient_pools = [gradient_pool(each, pp) for each in trained] if plan.zero > 1 else []
        self.gradients = _allocate(self.gradient_pools, held.gradient)
        self.num_programs = len(trained)
        self.bound_pool: Pool | None = None
        self.in_8_bits: list[tuple[Fp8Shard, Group]] = []  # with the group of each shard's holders
        self.tp_group: Group = None
        self.replicas: dict[ParamShard, dist.ProcessGroup] = {}
        self.bf16_reduce, self.sums_in_lane = plan.bf16_reduce, held.gradient.is_cuda
        self.unsummed: list[Callable[[], list[Arrival]]] = []
        self.begin(0)

    def join(self, groups: ProcessGroups) -> None:
        """Sets the groups over which weights are cast to 8 bits and gradients summed from now on; in the same order on
        DualPipe's mirror ranks."""
        self.in_8_bits, self.replicas, self.tp_group = [], {}, groups.layers.tp.group
        for shard, buffers in sorted(chain.from_iterable(self.trained.values()), key=lambda each: each[0]):
            if (narrow := buffers.parameters.in_8_bits) is not None:
                narrow.is_stale = True
                self.in_8_bits.append((narrow, groups.gradients[shard.stage][shard.experts]))
            if (group := groups.replicas[shard.stage][shard.experts]) is not None:
                self.replicas[shard] = group

    def updated(self, collectives: Collectives) -> None:
        """Called when a step has been committed. A commit needs no other rank, but casting weights to 8 bits does, so
        that is left to `refresh`."""
        for each, _ in self.in_8_bits:
            each.is_stale = True
        collectives.after_update()

    def refresh(self, collectives: Collectives) -> None:
        """Casts changed weights to 8 bits before they are gathered. All ranks must call it."""
        if self._is_stale:
            _cast(self.in_8_bits, self.tp_group)
            collectives.after_update()

    def begin(self, program: int) -> None:
        """Prepares for a step of this program of the plan: binds every stage to its gradient buffers there."""
        self.program = program
        if program >= len(self.gradient_pools) or self.gradient_pools[program] == self.bound_pool:
            return
        self.bound_pool = self.gradient_pools[program]
        for stage, _ in self.bound_pool.offsets:
            for shard, buffers in self.trained[stage]:
                if buffers.parameters.full_gradients is None:
                    buffers.set_gradients(self.full_gradients(shard, buffers, program))
            self.stages[stage].bind()

    def full_gradients(self, shard: ParamShard, buffers: ParamBuffers, program: int) -> torch.Tensor:
        """Where a rank accumulates the gradients of a shard in a program of the plan."""
        if buffers.parameters.full_gradients is not None:
            return buffers.parameters.full_gradients
        offset = self.gradient_pools[program].offsets[shard.stage, 0][shard.experts]
        return self.gradients[shard.experts][offset : offset + buffers.shard.layout.padded_size]

    def shared(self) -> dict[str, torch.Tensor]:
        """The tensors that peers read, by name."""
        found = dict[str, torch.Tensor]()
        for shard, buffer in chain.from_iterable(map(self._weights, self.stages)):
            if buffer.shard.layout.num_shards > 1:
                found |= {weights_name(shard, part.dtype): part for part in _own_parts(buffer)}
        for shard, buffers in chain.from_iterable(self.trained.values()):
            for program in range(self.num_programs if buffers.shard.layout.num_shards > 1 else 0):
                found[gradients_name(shard, program)] = self.full_gradients(shard, buffers, program)
        return found

    def gather(self, part: Instruction, collectives: Collectives, program: int) -> list[Arrival]:
        """ALL_GATHER: fills a stage's full weights, at the place that the program has for this gather."""
        works = list[Arrival]()
        for shard, buffer in self._weights(part.stage):
            held = buffer.shard
            if held.layout.num_shards == 1:
                continue
            full = held.full_weights
            if full is None:
                kind = shard.experts + TRAINED_KINDS * shard.frozen
                offset = self.weight_pools[program].offsets[part.stage, part.microbatch][kind]
                full = _fitted_weights(self.weights[kind], offset, buffer)
                buffer.set_weights(full)
            for parts, own in _gathers(buffer, full):
                works += collectives.all_gather(shard, parts, own)
        self.stages[part.stage].bind()
        return works

    def free(self, part: Instruction) -> None:
        """FREE: releases the buffers; the stage must not read its weights until the next gather."""
        for _, buffer in self._weights(part.stage):
            if buffer.shard.full_weights is None:
                buffer.clear_weights()
        self.stages[part.stage].bind()

    def scatter(self, part: Instruction, collectives: Collectives, *, is_last: bool) -> list[Arrival]:
        """REDUCE_SCATTER: adds this rank's shard of the summed full gradients to that of earlier microbatches; the last
        one of a step also sums over all replicas of the shard."""
        works = list[Arrival]()
        for shard, buffers in self.trained[part.stage]:
            sums, scattered = buffers.parameters.gradient, list[Arrival]()
            if buffers.shard.layout.num_shards > 1:
                assert buffers.gradients is not None
                full, accumulate = buffers.gradients.flat, buffers.has_partial_sum
                for segment in buffers.shard.layout.segments:
                    given = shard, sums[segment.own], full[segment.full], self.program
                    scattered += collectives.reduce_scatter(*given, accumulate=accumulate, first=segment.full.start)
                buffers.end_partial_sum()
                if shard in self.replicas and is_last:
                    scattered = self._sum_after(scattered, sums, self.replicas[shard])
            works += scattered
        return works

    def all_reduce(self, part: Instruction, groups: ProcessGroups) -> list[Arrival]:
        """ALL_REDUCE: sums the full gradients of a stage, none of which are sharded."""
        works = list[Arrival]()
        for (_, buffers), group in zip(self.trained[part.stage], groups.gradients[part.stage], strict=True):
            assert buffers.gradients is not None
            if group is not None and buffers.gradients.flat.numel():
                works += begin_all_reduce(buffers.gradients.flat, group, bf16=self.bf16_reduce)
        return works

    def sum_replicas(self) -> None:
        """NORM, on a CPU: runs the sums that `_sum_after` has deferred."""
        for work in [work for begin in self.unsummed for work in begin()]:
            with rank_waits.abandonable():
                work.wait()
            if isinstance(work, ContinuedWork):
                work.follow()
        self.unsummed.clear()

    def _sum_after(self, scattered: list[Arrival], sums: torch.Tensor, group: dist.ProcessGroup) -> list[Arrival]:
        """Sums a shard's gradients over its replicas once they have been `scattered`. On a GPU the lane does so. On a
        CPU the host would have to wait for the scatter, perhaps for a rank that itself waits for a transfer from this
        one, so the sum is deferred to NORM, in the same order on all ranks."""
        begin = partial(begin_all_reduce, sums, group, bf16=self.bf16_reduce)
        if not self.sums_in_lane:
            self.unsummed.append(begin)
            return scattered
        for work in scattered:
            work.wait()
        return begin()

    @contextmanager
    def gathered(self, groups: ProcessGroups, stage: int) -> Iterator[None]:
        """Gathers the full weights of a stage, between two steps, into its own buffers or the start of those that
        stages share. All ranks must enter."""
        if self._is_stale:
            _cast(self.in_8_bits, self.tp_group)
        for shard, buffer in self._weights(stage):
            held = buffer.shard
            if held.layout.num_shards == 1:
                continue
            full = held.full_weights
            if full is None:
                full = _fitted_weights(self.weights[shard.experts + TRAINED_KINDS * shard.frozen], 0, buffer)
                buffer.set_weights(full)
            # With peer copies, the weights of trained shards have no groups.
            group = groups.weights.get(shard) or groups.zero[stage][shard.experts]
            with rank_waits.abandonable():
                for parts, own in _gathers(buffer, full):
                    all_gather(parts, own, group=group)
        self.stages[stage].bind()
        yield
        for _, buffer in self._weights(stage):
            if buffer.shard.full_weights is None:
                buffer.clear_weights()
        self.stages[stage].bind()

    def clear(self) -> None:
        """Frees the buffers."""
        self.weights.clear()
        self.gradients.clear()

    @property
    def _is_stale(self) -> bool:
        return any(each.is_stale for each, _ in self.in_8_bits)

    def _weights(self, stage: int) -> list[tuple[ParamShard, WeightBuffer]]:
        """All weights that a stage reads."""
        return [*self.trained[stage], *self.frozen[stage]]


def _allocate(pools: list[Pool], like: torch.Tensor) -> list[torch.Tensor]:
    """Memory that suffices for the pools of every program, by kind of parameters."""
    return [like.new_zeros(elements) for elements in longest(pools)]


def _by_stage(
    shards: Iterable[ParamShard], buffers: Mapping[int, Iterable[B]]
) -> dict[int, list[tuple[ParamShard, B]]]:
    """Pairs the buffers of each stage, which are in the order of its shards, with these."""
    held = {stage: [shard for shard in shards if shard.stage == stage] for stage in buffers}
    return {stage: list(zip(held[stage], each, strict=True)) for stage, each in buffers.items()}


def _fitted_weights(pool: torch.Tensor, offset: int, buffer: WeightBuffer) -> torch.Tensor:
    """The part of a pool that a stage needs."""
    return pool[offset : offset + buffer.shard.layout.gathered_size(pool.element_size())]


def _own_parts(buffer: WeightBuffer) -> list[torch.Tensor]:
    """What this rank contributes to full weights; 8-bit weights as bytes."""
    narrow = buffer.parameters.in_8_bits if isinstance(buffer, ParamBuffers) else None
    both = (buffer.shard.compute, *(() if narrow is None else (narrow.values.view(torch.uint8),)))
    return [part for part in both if part.numel()]


def _gathers(buffer: WeightBuffer, full: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of `full` weights [gathered_size], each with this rank's contribution."""
    parts = (part for part in buffer.shard.gathered_parts(full) if part.numel())
    return zip(parts, _own_parts(buffer), strict=True)


def _cast(shards: Sequence[tuple[Fp8Shard, Group]], tp_group: Group) -> None:
    """Casts shards, each with the group of its holders, which must all call this in the same order. Per-matrix scales
    are the same on all tp ranks, each of which has a part of the matrix."""
    by_group: dict[Group, list[Fp8Shard]] = {}
    for shard, group in shards:
        shard.measure()
        by_group.setdefault(group, []).append(shard)
    for group, found in by_group.items():
        all_reduce_max_([shard.maxima for shard in found], group)
    all_reduce_max_([shard.maxima for shard, _ in shards if shard.recipe.scaling == "tensor"], tp_group)
    for shard, _ in shards:
        shard.cast()
