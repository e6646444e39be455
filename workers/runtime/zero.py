"""ZeRO (arXiv 1910.02054) on one rank: full weights and gradients while they are used, shards otherwise.

Weights are all-gathered, and gradients reduce-scattered, over the holders of a stage: data-parallel replicas and
DualPipe's mirror ranks alike. The full buffers that stages share (schedules/passes/zero.py) are allocated once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.passes.zero import BufferSlots, gradient_slots, sharded_stages, weight_slots
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.parallel.async_ops import all_gather, reduce_scatter
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params.param_buffers import WeightBuffer
from pentad.workers.params.parameters import BUFFERS, FullTensor, Parameters
from pentad.workers.params.weight_shard import WeightShard

MESSAGE_ELEMENTS = 2**24  # of a shard, in one message to the rank that saves it
BufferKey = tuple[int, int]  # the slot, and which of a stage's parameter buffers (dense, experts)


class ZeroShards:
    """Runs ALL_GATHER, FREE and REDUCE_SCATTER. A stage without other holders is never sharded."""

    def __init__(self, plan: Plan, rank: int, stages: Mapping[int, BaseStage]) -> None:
        self.stages, program, pp = stages, plan.program, plan.mesh.coordinates(rank).pp
        sharded = sharded_stages(program, pp) if plan.zero == 3 else set[int]()
        self.weight_slots = [weight_slots(each, pp, sharded) for each in plan.programs]  # by program
        self.weights = _allocate(self.weight_slots, stages, like="compute")
        self.gradient_slots = [gradient_slots(each, pp)[0] if plan.zero > 1 else {} for each in plan.programs]
        self.gradients = _allocate(self.gradient_slots, stages, like="gradient")
        self.bound_slots: BufferSlots = {}
        self.begin(0)

    def begin(self, program: int) -> None:
        """A step of this program of the plan follows: every stage adds gradients to its buffer there."""
        slots = self.gradient_slots[program]
        if slots == self.bound_slots:
            return
        self.bound_slots = slots
        for (stage, _), slot in slots.items():
            for kind, buffers in enumerate(self.stages[stage].param_buffers):
                if buffers.parameters.full_gradients is None:
                    buffers.set_gradients(_fitted(self.gradients[slot, kind], buffers))
            self.stages[stage].bind()

    def gather(self, part: Instruction, groups: ProcessGroups, program: int) -> list[dist.Work]:
        """ALL_GATHER: fills a stage's full weights, in the slot that this gather of a program has been assigned."""
        stage, works = self.stages[part.stage], []
        for kind, (buffer, group) in enumerate(zip(_weights(stage), groups.weights[part.stage], strict=True)):
            if group is None:
                continue
            held = buffer.shard
            full = held.full_weights
            if full is None:
                slot = self.weight_slots[program][part.stage, part.microbatch]
                full = _fitted(self.weights[slot, kind], buffer)
                buffer.set_weights(full)
            works.append(all_gather(full, held.compute, group=group, async_op=True))
        stage.bind()
        return works

    def free(self, part: Instruction) -> None:
        """FREE: gives the slot up; the stage must not read its weights until the next gather."""
        stage = self.stages[part.stage]
        for buffer in _weights(stage):
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


def _allocate(slots: list[BufferSlots], stages: Mapping[int, BaseStage], like: str) -> dict[BufferKey, torch.Tensor]:
    """A buffer for each slot and kind of parameters, as large as the largest stage that uses it."""
    users: dict[BufferKey, list[WeightShard]] = {}
    found = chain.from_iterable(each.items() for each in slots)
    for (stage, _), slot in sorted(found, key=lambda item: item[1]):
        for kind, buffers in enumerate(stages[stage].param_buffers if like == "gradient" else _weights(stages[stage])):
            users.setdefault((slot, kind), []).append(buffers.shard)
    return {
        key: getattr(held[0], like).new_zeros(max(each.layout.padded_size for each in held))
        for key, held in users.items()
    }


def _weights(stage: BaseStage) -> list[WeightBuffer]:
    """All that a stage reads, in the order of its groups."""
    return [*stage.param_buffers, *stage.frozen]


def _fitted(shared: torch.Tensor, buffer: WeightBuffer) -> torch.Tensor:
    """The part of a shared buffer that a stage needs."""
    return shared[: buffer.shard.layout.padded_size]
