"""The end of a step on one rank: what NORM, STEP and VALIDATE do.

`Barrier` lets every rank wait for the global norm; `PostValidated` takes the step ahead of it and hears it later (see
schedules/passes/validation.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.groups import Groups
from pentad.workers.params import optimizer
from pentad.workers.params.parameters import Parameters
from pentad.workers.runtime.tied import Tied
from pentad.workers.transport.norm_reducer import NormPartial, NormReducer

Check = Callable[[], None]


class Taken(NamedTuple):
    """A step that is in the weights; on a GPU, once it has come so far and `version` counts it.

    `losses` [replicas x microbatches] are the loss sums of the whole mesh, `norm` is the global gradient norm before
    clipping, a float64 scalar. Both lie on the host and are whole once the step has ended: who reads them waits for
    nothing that was issued later.
    """

    step: int
    losses: torch.Tensor
    norm: torch.Tensor


def on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host, whole once the current stream has come so far."""
    here = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return here.copy_(value, non_blocking=True)


def held(stages: dict[int, StageProtocol]) -> list[Parameters]:
    return [bank.parameters for stage in stages.values() for bank in stage.banks]


class Sums:
    """What the ranks add up at the end of a step, in float64: squares by shard, then losses by microbatch and context
    rank of the mesh.

    Every entry is given by one rank only, so that the sums are exact in any order. The losses travel along, so that a
    committed step's loss outlives the rank that computed it.
    """

    def __init__(self, plan: Plan, rank: int, stages: dict[int, StageProtocol]) -> None:
        self.plan, self.stages, self.at = plan, stages, plan.mesh.coordinates(rank)
        self.rank, self.limit = rank, plan.optimizer.clip_norm
        *first, self.squares = accumulate(map(plan.shards, plan.shares), initial=0)
        self.first = dict(zip(plan.shares, first, strict=True))
        self.shape = (plan.batch.replicas, plan.batch.microbatches, plan.mesh.cp)
        device = next(iter(stages.values())).sums.device
        self.values = torch.zeros(self.squares + math.prod(self.shape), dtype=torch.float64, device=device)

    def fill(self) -> torch.Tensor:
        """This rank's part: of a share's square that of its shard, and that of one that is not cut if it owns it."""
        self.values.zero_()
        at = self.at
        for share in self.plan.shares_of(self.rank):
            stage = self.stages[share.stage]
            bank = stage.banks[share.experts]
            bank.copies.reduce(stage.around.tensor.group)
            cut = bank.parameters.cut
            if cut.parts > 1 or self.plan.owner(share) == self.rank:
                square = optimizer.square_sum(bank.parameters, bank.copies.counted)
                self.values[self.first[share] + cut.number] = square
        ends = [stage for stage in self.stages.values() if stage.last and at.tp == 0]
        for stage in ends:
            self.losses(self.values)[at.dp * self.plan.mesh.ep + at.ep, :, at.cp] += stage.loss_sums
        return self.values

    def norm(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[: self.squares].sum().sqrt()

    def losses(self, whole: torch.Tensor) -> torch.Tensor:
        """Of every replica, microbatch and context rank."""
        return whole[self.squares :].view(self.shape)


class Barrier:
    """All ranks of the mesh meet at NORM: when one has the norm, every rank's gradients are whole.

    `version` (on the device) counts the steps that are in the weights, `norm` is that of the newest one; `ready` says
    that only its global norm lacks for one more. `fence` (on the host) is 0 until another thread makes it nan, which a
    GPU that runs behind its host sees at NORM: the step then changes no weight, and its gradients stay, for a host
    issues no W until the step before has ended.
    """

    def __init__(self, plan: Plan, groups: Groups, stages: dict[int, StageProtocol]) -> None:
        self.plan, self.groups, self.stages = plan, groups, stages
        self.sums = Sums(plan, groups.rank, stages)
        self.tied = Tied(plan, groups.rank, stages, groups.tied)
        # in one order, as mirrors hold the same stages in another
        each = [(stage.balance, groups.holders[index][0]) for index, stage in sorted(stages.items())]
        self.balances = [(balance, group) for balance, group in each if balance is not None]
        device = self.sums.values.device
        self.fence = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.version = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.taken: list[Taken] = []
        self.whole, self.reduced = self._unfenced(), -1

    @property
    def ready(self) -> bool:
        return bool(self.whole) and int(self.version) == self.reduced

    def reduce(self, step: int, check: Check) -> None:
        """NORM."""
        self.tied.reduce()
        for balance, group in self.balances:
            balance.reduce(group)
        values = self.sums.fill()
        self.whole, self.reduced = self._unfenced(), step  # nobody has cut short what they were summed with
        if self.groups.everyone is not None:
            dist.all_reduce(values, group=self.groups.everyone)
        check()
        self.open = self._unfenced()
        self.heard = torch.where(self.open, self.sums.norm(values), torch.nan)
        self.losses = self.sums.losses(values).sum(2).flatten()

    def take(self, step: int) -> None:
        """STEP, scaled as NORM says; a step after the fence counts for nothing."""
        for parameters in held(self.stages):
            factor = optimizer.clip(self.heard, self.sums.limit, parameters.master.dtype)
            optimizer.step(parameters, self.plan.optimizer, step, factor)
        for balance, _ in self.balances:
            balance.take(self.open & self.heard.isfinite())
        self.version = torch.where(self.open, step + 1, self.version)
        self.norm = torch.where(self.open, self.heard, self.norm)
        self.taken.append(Taken(step, on_host(self.losses), on_host(self.heard)))

    def advance(self, step: int, norm: float) -> None:
        """Takes the step that lacked its global norm only: another rank has heard it before the generation ended."""
        self.heard = torch.tensor(norm, dtype=torch.float64, device=self.version.device)
        self.open = torch.ones((), dtype=torch.bool, device=self.version.device)
        self.take(step)

    def validate(self, check: Check) -> bool:
        raise AssertionError("a step with a barrier has no VALIDATE")

    def finish(self, check: Check) -> None:
        """Nothing is left to hear."""

    def close(self) -> None:
        """Nothing to give up."""

    def _unfenced(self) -> torch.Tensor:
        """Whether the generation is not over: on a GPU, once the current stream has come so far."""
        return self.fence.to(self.version.device, non_blocking=True) == 0


class PostValidated:
    """The step is taken ahead, into the compute weights alone, and into the master weights once the norm is known.

    The attributes are those of `Barrier`. The gradients stay until then, and so does all that the step was made from.
    """

    def __init__(self, plan: Plan, rank: int, stages: dict[int, StageProtocol], courier: NormReducer) -> None:
        self.plan, self.stages, self.courier = plan, stages, courier
        self.sums = Sums(plan, rank, stages)
        device = self.sums.values.device
        self.fence = torch.zeros((), dtype=torch.float64)
        self.version = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = self.losses = torch.zeros(1)
        self.taken: list[Taken] = []
        self.ahead = -1  # the step whose norm is still to be heard

    @property
    def ready(self) -> bool:
        return 0 <= self.ahead == self.courier.given

    def reduce(self, step: int, check: Check) -> None:
        """NORM: hands this rank's part to the courier."""
        values = self.sums.fill()
        self.ahead = step
        if values.device.type == "cpu":
            self.courier.bring(NormPartial(step, values.clone(), lambda: True))
            return
        here = on_host(values)
        arrived = torch.cuda.Event()
        arrived.record()
        self.courier.bring(NormPartial(step, here, arrived.query))

    def take(self, step: int) -> None:
        """STEP, ahead of the norm."""
        for parameters in held(self.stages):
            optimizer.step_ahead(parameters, self.plan.optimizer, step)

    def validate(self, check: Check) -> bool:
        """VALIDATE: hears the norm and takes the step for good. False when the weights are others than were taken
        ahead; what was computed with those counts for nothing."""
        if self.ahead < 0:
            return True
        parts = self.courier.hear(self.ahead, check)
        whole = parts.sum(0)  # every entry is one pipeline's, and zero in the others
        self.losses = self.sums.losses(whole).sum(2).flatten()
        return self._commit(self.sums.norm(whole))

    def finish(self, check: Check) -> None:
        """When no step follows for now: nothing was computed with the last one's weights yet."""
        self.validate(check)

    def advance(self, step: int, norm: float) -> None:
        """Takes the step that lacked its global norm only: another rank has heard it before the generation ended."""
        self._commit(torch.tensor(norm, dtype=torch.float64))

    def close(self) -> None:
        self.courier.close()

    def _commit(self, norm: torch.Tensor) -> bool:
        dtype = held(self.stages)[0].master.dtype
        factor, step = optimizer.clip(norm, self.sums.limit, dtype), self.ahead
        finite, unscaled = bool(factor.isfinite()), bool(factor == 1)
        scale = factor.to(self.version.device, non_blocking=True)
        for parameters in held(self.stages):
            if not finite:
                parameters.refresh()
            optimizer.step(parameters, self.plan.optimizer, step, scale)
        self.version.fill_(step + 1)
        self.norm, self.ahead = norm, -1
        self.taken.append(Taken(step, self.losses, norm))
        return unscaled
