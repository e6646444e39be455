"""What ZeRO (arXiv 1910.02054) does with the stages of a rank: whole weights and gradients for a while, shards to keep.

The sum of the gradients is scattered and the weights are gathered over the holders of a stage, replicas and mirrors
alike. Whole buffers that stages take turns on (passes/pools.py) are made once: memory is what the program says.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.passes.pools import Slots, gradient_slots, weight_slots
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.groups import Groups
from pentad.workers.parallel.tensor_parallel import gather_all, scatter_sum
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.parameters import Parameters

CHUNK = 2**24  # elements of a shard that travel at once to who saves it
Slot = tuple[int, int]  # number of the buffer and of the bank


class ZeroShards:
    """Runs ALL_GATHER, FREE and REDUCE_SCATTER of a rank. A stage that it alone holds is whole all the time."""

    def __init__(self, plan: Plan, rank: int, stages: Mapping[int, StageProtocol]) -> None:
        self.stages, program, pp = stages, plan.program, plan.mesh.coordinates(rank).pp
        self.slots = weight_slots(program, pp) if plan.zero == 3 else {}
        self.weights = _buffers(self.slots, stages, like="compute")
        turns = gradient_slots(program, pp)[0] if plan.zero > 1 else {}
        self.gradients = _buffers(turns, stages, like="gradient")
        for (stage, _), slot in turns.items():
            for number, bank in enumerate(stages[stage].banks):
                if bank.parameters.gradients is None:
                    bank.accumulate_in(_whole(self.gradients[slot, number], bank))
            stages[stage].bind()

    def gather(self, part: Instruction, groups: Groups) -> list[dist.Work]:
        """ALL_GATHER: what the layers read is in the buffer of this turn from here on."""
        stage, running = self.stages[part.stage], []
        for number, (bank, group) in enumerate(zip(stage.banks, groups.gatherers[part.stage], strict=True)):
            if group is None:
                continue
            whole = bank.parameters.weights
            if whole is None:
                whole = _whole(self.weights[self.slots[part.stage, part.microbatch], number], bank)
                bank.read(whole)
            for bucket, mine in zip(whole.chunk(bank.parameters.cut.buckets), bank.parameters.compute, strict=True):
                running.append(gather_all(bucket, mine, group=group, async_op=True))
        stage.bind()
        return running

    def free(self, part: Instruction) -> None:
        """FREE: nothing may read the buffer any more."""
        stage = self.stages[part.stage]
        for bank in stage.banks:
            if bank.parameters.weights is None:
                bank.forget()
        stage.bind()

    def scatter(self, part: Instruction, groups: Groups) -> list[dist.Work]:
        """REDUCE_SCATTER: this rank's part of the sum of a bucket of the whole gradients."""
        running, number = [], max(0, part.microbatch)
        for bank, group in zip(self.stages[part.stage].banks, groups.holders[part.stage], strict=True):
            if group is None:
                continue
            assert bank.whole is not None
            bank.stale = True
            mine, bucket = bank.parameters.gradient[number], bank.whole[bank.buckets[number].span]
            running.append(scatter_sum(mine, bucket, group=group, async_op=True))
        return running

    def clear(self) -> None:
        """Gives the buffers back."""
        self.weights.clear()
        self.gradients.clear()


def collect(
    parameters: Parameters, owner: int, rank: int, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor] | None:
    """A rank's part of a stage, by kind of state, flat, whole and on the host of its `owner` (a rank of the mesh); None
    elsewhere. All holders take part; it travels in small parts, so that no device needs room for more."""
    cut, found = parameters.cut, dict[str, torch.Tensor]()
    if cut.parts == 1:
        return parameters.state() if rank == owner else None
    for kind, shard in parameters.state().items():
        whole = torch.empty(cut.buckets, cut.parts, cut.part if rank == owner else 0, dtype=shard.dtype)
        for bucket, start in product(range(cut.buckets), range(0, cut.part, CHUNK)):
            mine = shard[bucket, start : start + CHUNK]
            parts = [torch.empty_like(mine) for _ in range(cut.parts)] if rank == owner else None
            dist.gather(mine, parts, dst=owner, group=group)
            for number, part in enumerate(parts or ()):
                whole[bucket, number, start : start + part.numel()] = part
        found[kind] = whole.flatten()
    return found if rank == owner else None


def _buffers(slots: Slots, stages: Mapping[int, StageProtocol], like: str) -> dict[Slot, torch.Tensor]:
    """By slot and number of the bank, as long as the longest stage that uses it."""
    found: dict[Slot, torch.Tensor] = {}
    using: dict[Slot, list[Parameters]] = {}
    for (stage, _), slot in sorted(slots.items(), key=lambda item: item[1]):
        for number, bank in enumerate(stages[stage].banks):
            using.setdefault((slot, number), []).append(bank.parameters)
    for at, parameters in using.items():
        found[at] = getattr(parameters[0], like).new_zeros(max(each.cut.whole for each in parameters))
    return found


def _whole(buffer: torch.Tensor, bank: ParamBuffers) -> torch.Tensor:
    return buffer[: bank.parameters.cut.whole]
