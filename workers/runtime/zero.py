"""ZeRO (arXiv 1910.02054) on one rank: full weights and gradients while they are used, shards otherwise.

Weights are all-gathered, and gradients reduce-scattered, over the holders of a stage: data-parallel replicas and
DualPipe's mirror ranks alike. The full buffers that stages share (schedules/passes/zero_buffers.py) are allocated once.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.parallel.async_ops import all_gather, reduce_scatter
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params.param_buffers import WeightBuffer
from pentad.workers.params.parameters import BUFFERS, FullTensor, Parameters

MESSAGE_ELEMENTS = 2**24  # of a shard, in one message to the rank that saves it


class ZeroShards:
    """Runs ALL_GATHER, FREE and REDUCE_SCATTER. A stage without other holders is never sharded."""

    def __init__(self, plan: Plan, rank: int, stages: Mapping[int, BaseStage]) -> None:
        self.stages, program, pp = stages, plan.program, plan.mesh.coordinates(rank).pp
        sharded = sharded_stages(program, pp) if plan.zero == 3 else set[int]()
        self.weight_pools = [weight_pool(each, pp, sharded) for each in plan.programs]
        held = next(iter(stages.values())).param_buffers[0].parameters
        self.weights = _allocate(self.weight_pools, held.compute)
        trained = plan.trained_programs if plan.zero > 1 else ()
        self.gradient_pools = [gradient_pool(each, pp) for each in trained]
        self.gradients = _allocate(self.gradient_pools, held.gradient)
        self.bound_pool: Pool | None = None
        self.begin(0)

    def begin(self, program: int) -> None:
        """A step of this program of the plan follows: every stage adds gradients to its place there."""
        if program >= len(self.gradient_pools) or self.gradient_pools[program] == self.bound_pool:
            return
        self.bound_pool = self.gradient_pools[program]
        for (stage, _), offsets in self.bound_pool.offsets.items():
            for kind, buffers in enumerate(self.stages[stage].param_buffers):
                if buffers.parameters.full_gradients is None:
                    buffers.set_gradients(_fitted(self.gradients[kind], offsets[kind], buffers))
            self.stages[stage].bind()

    def gather(self, part: Instruction, groups: ProcessGroups, program: int) -> list[dist.Work]:
        """ALL_GATHER: fills a stage's full weights, at the place of this gather of a program."""
        stage, works = self.stages[part.stage], []
        for (kind, buffer), group in zip(_weights(stage), groups.weights[part.stage], strict=True):
            if group is None:
                continue
            held = buffer.shard
            full = held.full_weights
            if full is None:
                offset = self.weight_pools[program].offsets[part.stage, part.microbatch][kind]
                full = _fitted(self.weights[kind], offset, buffer)
                buffer.set_weights(full)
            works.append(all_gather(full, held.compute, group=group, async_op=True))
        stage.bind()
        return works

    def free(self, part: Instruction) -> None:
        """FREE: gives the place up; the stage must not read its weights until the next gather."""
        stage = self.stages[part.stage]
        for _, buffer in _weights(stage):
            if buffer.shard.full_weights is None:
                buffer.clear_weights()
        stage.bind()

    def scatter(self, part: Instruction, groups: ProcessGroups) -> list[dist.Work]:
        """REDUCE_SCATTER: this rank's shard of the sum of the full gradients, of which its own have the sum so far."""
        works = []
        for buffers, group in zip(self.stages[part.stage].param_buffers, groups.gradients[part.stage], strict=True):
            if group is None:
                continue
            assert buffers.gradients is not None
            buffers.begin_microbatch()
            shard, full = buffers.parameters.gradient, buffers.gradients.flat
            works.append(reduce_scatter(shard, full, group=group, async_op=True))
        return works

    def clear(self) -> None:
        """Frees the buffers."""
        self.weights.clear()
        self.gradients.clear()


def gather_state(
    parameters: Parameters, owner: int, rank: int, group: dist.ProcessGroup | None
) -> list[FullTensor] | None:
    """The full state of one parameter shard, on the host of its `owner` if it is sharded; None on other ranks.

    All holders must call it. Messages are small, so no device needs memory for a full buffer.
    """
    layout, is_owner = parameters.layout, rank == owner
    if layout.num_shards == 1:
        return [(kind, local, values) for kind, local, _, values in parameters.state_parts()] if is_owner else None
    found: list[FullTensor] = []
    for buffer in BUFFERS:
        dtype, size = getattr(parameters, buffer).dtype, layout.part if is_owner else 0
        full = torch.empty(layout.num_shards, size, dtype=dtype)
        for start in range(0, layout.part, MESSAGE_ELEMENTS):
            message = parameters.window(buffer, start, min(start + MESSAGE_ELEMENTS, layout.part))
            received = [torch.empty_like(message) for _ in range(layout.num_shards)] if is_owner else None
            dist.gather(message, received, dst=owner, group=group)
            for index, part in enumerate(received or ()):
                full[index, start : start + part.numel()] = part
        found += parameters.full_tensors(buffer, full.flatten()) if is_owner else []
    return found if is_owner else None


def _allocate(pools: list[Pool], like: torch.Tensor) -> list[torch.Tensor]:
    """Memory for the pools of all programs, by kind of parameters."""
    return [like.new_zeros(elements) for elements in longest(pools)]


def _weights(stage: BaseStage) -> list[tuple[int, WeightBuffer]]:
    """All that a stage reads with its kind in pools, in the order of its groups."""
    return [*enumerate(stage.param_buffers), *enumerate(stage.frozen, TRAINED_KINDS)]


def _fitted(pool: torch.Tensor, offset: int, buffer: WeightBuffer) -> torch.Tensor:
    """The part of a pool that a stage needs."""
    return pool[offset : offset + buffer.shard.layout.padded_size]
