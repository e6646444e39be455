"""What all ranks sum at the end of a step: gradient norms, losses, counts."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.parallel.expert_parallel import ExpertSlots
from pentad.workers.params import optimizer


class StepTotals:
    """What ranks sum at the end of a step, in float64: squared gradient norms by shard; squared log-sum-exps by rank;
    losses by replica, microbatch, sequence and cp rank; how often tokens found no slot to their experts; target tokens
    by data source and digests of samples, which `begin` sets for a step.

    Every entry has one contributor, or sums whole numbers, so sums are exact in any order; except that with data-aware
    groups, documents of one row are on several ranks. All ranks get the losses, so those of a committed step survive
    the rank that computed them.
    """

    def __init__(self, plan: Plan, rank: int, stages: dict[int, BaseStage], slots: ExpertSlots | None) -> None:
        self.plan, self.stages, self.at, self.rank = plan, stages, plan.mesh.coordinates(rank), rank
        *first, self.num_squares = accumulate(map(plan.num_zero_shards, plan.param_shards), initial=0)
        self.first_square = dict(zip(plan.param_shards, first, strict=True))
        self.counted = {shard for shard in plan.param_shards_of(rank) if replicas(plan, shard, rank)[0] == rank}
        batch, self.num_sources = plan.batch, len(plan.data.sources)
        self.loss_shape = (batch.replicas, batch.microbatches, batch.micro_batch_size, plan.mesh.cp)
        self.counts = plan.owner(ParamShard(plan.program.stages - 1)) == rank
        self.lse_shape = (batch.replicas, plan.mesh.cp, plan.mesh.pp, 2)
        self.first_loss = self.num_squares + math.prod(self.lse_shape)
        self.num_losses, self.slots = math.prod(self.loss_shape), slots
        self.overflow_at = self.first_loss + self.num_losses
        size = self.overflow_at + 1 + self.num_sources + 1
        self.values = torch.zeros(size, dtype=torch.float64, device=next(iter(stages.values())).device)
        self.own_counts = self.values[-self.num_sources - 1 :].clone()

    def begin(self, counts: torch.Tensor) -> None:
        """Starts a step whose counts [sources + 1] on this rank are `counts` (see `Batch`)."""
        self.own_counts = counts

    def fill(self) -> torch.Tensor:
        """This rank's entries, zeros elsewhere. Of a shard's replicas, only the first contributes its square."""
        self.values.zero_()
        at = self.at
        for shard in self.plan.param_shards_of(self.rank):
            buffers = self.stages[shard.stage].param_buffers[shard.experts]
            buffers.replicated.reduce(self.stages[shard.stage].layer_context.tp.group)
            if shard in self.counted:
                at_part = self.first_square[shard] + buffers.parameters.layout.shard_index
                self.values[at_part] = optimizer.square_sum(buffers.parameters, buffers.replicated.counted)
        replica = at.dp * self.plan.mesh.ep + at.ep
        for stage in self.stages.values() if at.tp == 0 else ():
            self._squared_lse(self.values)[replica, at.cp, at.pp] += stage.squared_lse
            if stage.last:
                sums, losses = stage.loss_sums, self._losses(self.values)[..., at.cp]
                if self.plan.batch.capacity:  # rows of all replicas
                    losses += sums.view(losses.shape)
                else:
                    losses[replica] += sums
        if self.slots is not None:
            self.values[self.overflow_at] = self.slots.overflows
        first = 0 if self.counts else self.num_sources
        self._counts(self.values)[first:].copy_(self.own_counts[first:])
        return self.values

    def norm(self, totals: torch.Tensor) -> torch.Tensor:
        """The global gradient norm, a scalar."""
        return totals[: self.num_squares].sum().sqrt()

    def has_room(self, totals: torch.Tensor) -> torch.Tensor:
        """A bool scalar: whether all tokens have reached their experts."""
        return totals[self.overflow_at] == 0

    def losses(self, totals: torch.Tensor) -> torch.Tensor:
        """[global_batch_size + sources + 1], as in CommittedStep."""
        return torch.cat((self._losses(totals).sum(3).flatten(), self._counts(totals)))

    def squared_lse(self, totals: torch.Tensor) -> torch.Tensor:
        """[2]; 0 without a z-loss."""
        return self._squared_lse(totals).sum((0, 1, 2))

    def mean_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """A scalar, 0 without target tokens."""
        first = -self.num_sources - 1  # of the counts
        return losses[:first].sum() / losses[first:-1].sum().clamp(min=1)

    def _counts(self, totals: torch.Tensor) -> torch.Tensor:
        return totals[-self.num_sources - 1 :]

    def _squared_lse(self, totals: torch.Tensor) -> torch.Tensor:
        return totals[self.num_squares : self.first_loss].view(self.lse_shape)

    def _losses(self, totals: torch.Tensor) -> torch.Tensor:
        return totals[self.first_loss : self.first_loss + self.num_losses].view(self.loss_shape)
