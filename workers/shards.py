"""What ZeRO (arXiv 1910.02054) does with the stages of a rank: whole weights and gradients for a while, shards to keep.

The sum of the gradients is scattered and the weights are gathered over the holders of a stage, replicas and mirrors
alike. Whole buffers that stages take turns on (schedules/pools.py) are made once: memory is what the program says.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.schedules.instruction import Instruction
from pentad.schedules.plan import Plan
from pentad.schedules.pools import Slots, gradient_slots, weight_slots
from pentad.workers.groups import Groups
from pentad.workers.parameters import Parameters
from pentad.workers.stage import Stage

CHUNK = 2**24  # elements of a shard that travel at once to who saves it
# torch 2.13 gives them new names
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Shards:
    """Runs ALL_GATHER, FREE and REDUCE_SCATTER of a rank. A stage that it alone holds is whole all the time."""

    def __init__(self, plan: Plan, rank: int, stages: dict[int, Stage]) -> None:
        self.stages, program, pp = stages, plan.program, plan.mesh.coordinates(rank).pp
        self.slots = weight_slots(program, pp) if plan.zero == 3 else {}
        self.weights = _buffers(self.slots, stages, like="compute")
        turns = gradient_slots(program, pp)[0] if plan.zero > 1 else {}
        self.gradients = _buffers(turns, stages, like="gradient")
        for (stage, _), slot in turns.items():
            stages[stage].accumulate_in(_whole(self.gradients[slot], stages[stage]))

    def gather(self, part: Instruction, groups: Groups) -> dist.Work | None:
        """ALL_GATHER: what the layers read is in the buffer of this turn from here on."""
        stage, group = self.stages[part.stage], groups.gatherers[part.stage]
        if group is None:
            return None
        whole = stage.parameters.weights
        if whole is None:
            whole = _whole(self.weights[self.slots[part.stage, part.microbatch]], stage)
            stage.read(whole)
        return _gather(whole, stage.parameters.compute, group=group, async_op=True)

    def free(self, part: Instruction) -> None:
        """FREE: nothing may read the buffer any more."""
        stage = self.stages[part.stage]
        if stage.parameters.weights is None:
            stage.forget()

    def scatter(self, part: Instruction, groups: Groups) -> dist.Work:
        """REDUCE_SCATTER: this rank's shard of the sum of the whole gradients."""
        stage = self.stages[part.stage]
        stage.stale = True
        group = groups.holders[part.stage]
        work = _scatter(stage.parameters.gradient, stage.whole, group=group, async_op=True)
        assert work is not None
        return work

    def clear(self) -> None:
        """Gives the buffers back."""
        self.weights.clear()
        self.gradients.clear()


def collect(parameters: Parameters, owner: int, rank: int, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """The state of a stage by global name, whole and on the host of its `owner` (a rank of the mesh), empty elsewhere.
    All holders take part; it travels in small parts, so that no device needs room for more."""
    cut, found = parameters.cut, dict[str, torch.Tensor]()
    for kind, shard in parameters.state().items():
        whole = torch.empty(cut.parts, cut.length if rank == owner else 0, dtype=shard.dtype)
        for start in range(0, cut.length, CHUNK):
            mine = shard[start : start + CHUNK]
            parts = [torch.empty_like(mine) for _ in range(cut.parts)] if rank == owner else None
            dist.gather(mine, parts, dst=owner, group=group)
            for number, part in enumerate(parts or ()):
                whole[number, start : start + part.numel()] = part
        found[kind] = whole.flatten()
    return parameters.named(found) if rank == owner else {}


def _buffers(slots: Slots, stages: dict[int, Stage], like: str) -> dict[int, torch.Tensor]:
    """By slot, as long as the longest stage that uses it."""
    found: dict[int, torch.Tensor] = {}
    for slot in sorted(set(slots.values())):
        using = [stages[stage].parameters for (stage, _), number in slots.items() if number == slot]
        length = max(each.cut.parts * each.cut.length for each in using)
        found[slot] = getattr(using[0], like).new_zeros(length)
    return found


def _whole(buffer: torch.Tensor, stage: Stage) -> torch.Tensor:
    cut = stage.parameters.cut
    return buffer[: cut.parts * cut.length]
