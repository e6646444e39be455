"""Tied embeddings across pipeline stages: the first and the last stage each have a copy and sum its gradients.

The last stage needs the embedding as its head or for multi-token prediction. The sum is taken just before the gradient
norm, which counts it once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.rank_waits import rank_waits


class EmbeddingPart(NamedTuple):
    """The part of one copy in a rank's shard: `gradient[shard_index]` holds the elements `span` of the copy. Of the
    ranks that hold the same elements, one `contributes` them."""

    gradient: torch.Tensor
    shard_index: slice
    span: slice
    contributes: bool


class TiedEmbedding:
    """The copies on one rank; `group` are the ranks of its tp coordinate that have either copy."""

    def __init__(self, plan: Plan, rank: int, stages: dict[int, BaseStage], group: dist.ProcessGroup | None) -> None:
        self.group, self.parts, self.size = group, list[EmbeddingPart](), 0
        for param_shard in plan.param_shards_of(rank) if plan.is_tied else ():
            if param_shard.experts or param_shard.stage not in (0, plan.program.stages - 1):
                continue
            parameters = stages[param_shard.stage].param_buffers[0].parameters
            (copy,) = (each for each in parameters.local_tensors if "embedding" in (each.name, each.tensor.tied_to))
            self.size, self.gradient = math.prod(copy.shape), parameters.gradient
            contributes = replicas(plan, param_shard, rank)[0] == rank
            for local, index, span in parameters.shard_spans():
                if local is copy:
                    self.parts.append(EmbeddingPart(parameters.gradient, index, span, contributes))

    def reduce(self) -> None:
        """Replaces the gradients of both copies by their sum, in place if the rank has all of one copy."""
        if not self.size:
            return
        whole = next((part for part in self.parts if part.span == slice(0, self.size)), None)
        others = [part for part in self.parts if part is not whole]
        if whole is None:
            total = self.gradient.new_zeros(self.size)
        else:
            total = whole.gradient[whole.shard_index]
            if not whole.contributes:
                total.zero_()
        for part in others:
            if part.contributes:
                total[part.span] += part.gradient[part.shard_index]
        with rank_waits.abandonable():
            dist.all_reduce(total, group=self.group)
        for part in others:
            part.gradient[part.shard_index] = total[part.span]
