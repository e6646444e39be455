"""LOSS: sums the losses of an evaluation over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.rank_waits import rank_waits


class LossTotals:
    """For every data set, the sum of its token losses so far and the number of its targets, in float64.

    A round is one run of the forward-only program on sequences of one data set. Its losses are summed over ranks by
    replica, microbatch and cp rank: every entry has one contributor, so the sums are exact in any order.
    """

    def __init__(self, plan: Plan, rank: int, stages: dict[int, BaseStage], world: dist.ProcessGroup | None) -> None:
        at, batch = plan.mesh.coordinates(rank), plan.batch
        self.last = next((stage for stage in stages.values() if stage.last and at.tp == 0), None)
        self.place = at.dp * plan.mesh.ep + at.ep, at.cp
        device = next(iter(stages.values())).device
        data_sets = 0 if plan.eval is None else len(plan.eval.data_sets)
        sizes, wide = (batch.replicas, plan.mesh.cp, batch.microbatches, 2), torch.float64
        self.world, self.values = world, torch.zeros(sizes, dtype=wide, device=device)
        self.counts = torch.zeros(batch.microbatches, dtype=wide, device=device)
        self.sums = torch.zeros(data_sets, 2, dtype=wide, device=device)
        self.filled = torch.cuda.Event() if device.type == "cuda" else None
        self.slices, self.data_set = plan.program.slices, 0

    def clear(self) -> None:
        """Starts an evaluation."""
        self.sums.zero_()

    def begin(self, data_set: int) -> None:
        """Starts a round, on the compute lane."""
        self.data_set = data_set
        if self.filled is not None:  # LOSS of the previous round may still have to read what is cleared now
            torch.cuda.current_stream().wait_event(self.filled)
        self.counts.zero_()

    def count(self, microbatch: int, targets: torch.Tensor) -> None:
        """Counts the targets [T] of a slice of a microbatch; -100 is not counted."""
        self.counts[microbatch].add_((targets >= 0).sum())

    def reduce(self) -> None:
        """LOSS: sums the round over all ranks."""
        self.values.zero_()
        if self.last is not None:
            self.values[self.place] = torch.stack((self.last.loss_sums[: len(self.counts)].sum(1), self.counts), dim=1)
        if self.filled is not None:
            self.filled.record()
        if self.world is not None:
            with rank_waits.abandonable():
                dist.all_reduce(self.values, group=self.world)
        self.sums[self.data_set] += self.values.sum((0, 1, 2))

    def read(self) -> list[tuple[float, int]]:
        """(sum of losses, number of targets) by data set, once the last round has ended."""
        return [(loss, round(count)) for loss, count in self.sums.tolist()]
