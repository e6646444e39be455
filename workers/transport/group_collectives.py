"""ZeRO's collectives through process groups: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import ParamShard
from pentad.workers.parallel.async_ops import Arrival, all_gather, reduce_scatter
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.transport.bf16_reduction import all_reduce_bf16, reduce_scatter_bf16


def begin_all_reduce(gradients: torch.Tensor, group: dist.ProcessGroup, *, bf16: bool) -> list[Arrival]:
    """Starts replacing gradients [n] by their sum over the ranks of the group; with `bf16`, of terms in bfloat16."""
    if bf16:
        return all_reduce_bf16(gradients, group)
    return [dist.all_reduce(gradients, group=group, async_op=True)]


@dataclass(frozen=True)
class GroupCollectives:
    """Collectives of one rank; they have ended once the works that they return have. With `bf16_reduce`, gradients
    travel in bfloat16."""

    groups: ProcessGroups
    bf16_reduce: bool

    def all_gather(self, shard: ParamShard, full: torch.Tensor, part: torch.Tensor) -> list[Arrival]:
        """Fills `full` [holders part] with the weights of all ranks among which ZeRO divides them; this rank has
        `part`."""
        return [all_gather(full, part, group=self.groups.weights[shard], async_op=True)]

    def reduce_scatter(
        self,
        shard: ParamShard,
        part: torch.Tensor,
        full: torch.Tensor,
        program: int,
        *,
        accumulate: bool,
        first: int,
    ) -> list[Arrival]:
        """Sums the elements of `part` over the holders' gradients, of which this rank has `full`, and writes the sum to
        `part` or, with `accumulate`, adds it. `part` may be its place in `full`."""
        group = self.groups.zero[shard.stage][shard.experts]
        assert group is not None
        if self.bf16_reduce:
            return reduce_scatter_bf16(part, full, group, accumulate=accumulate)
        if accumulate:
            full.view(group.size(), -1)[group.rank()].add_(part)
        return [reduce_scatter(part, full, group=group, async_op=True)]

    def after_update(self) -> None:
        """Nothing to do: all holders meet in every collective."""

    def close(self) -> None:
        """Nothing to do: the process groups have another owner."""
