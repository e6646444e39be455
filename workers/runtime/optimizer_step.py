"""The end of a step on one rank: NORM, STEP and VALIDATE.

`BarrierStep` waits for the global gradient norm before it updates weights. `PostValidatedStep` updates them first and
checks the norm in the next step (schedules/passes/post_validation.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.checkpoint.snapshot import Snapshots, state_update
from pentad.workers.lanes.streams import Check
from pentad.workers.linear.amax_history import reduce_maxima
from pentad.workers.linear.fp8_gradients import KeptGradients
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.model.step_totals import StepTotals
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params import optimizer
from pentad.workers.params.muon import MuonExchange
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.spike_filter import SpikeFilter
from pentad.workers.rank_waits import rank_waits
from pentad.workers.runtime.tied import TiedEmbedding
from pentad.workers.transport.norm_reducer import NormPartial, NormReducer


class CommittedStep(NamedTuple):
    """A step committed to the master weights; on a GPU, once the GPU has reached the commit.

    `losses` [global_batch_size + sources + 1] are sums over the target tokens of each sequence (0 for microbatches that
    a replica lacks in a smaller batch), then the target tokens by data source, and the sample digests, summed over
    ranks. `squared_lse` [2] are the sums of squared log-sum-exps for z-losses: of the model's logits, and of all
    routers'. `norm`, a scalar, is the global gradient norm before clipping; `taken` is the same, or nan if the update
    was skipped. All are float64 on the host, valid once the step has ended. `has_room`, a bool scalar, is false if
    tokens found no slot to their experts: the step then does not count, and nothing has changed.
    """

    step: int
    losses: torch.Tensor
    norm: torch.Tensor
    taken: torch.Tensor
    squared_lse: torch.Tensor
    has_room: torch.Tensor = torch.ones((), dtype=torch.bool)


class LocalUpdate(NamedTuple):
    """This rank's contribution to a step: its gradients and, with Muon, their directions. `complete`, a bool scalar, is
    false if an abort may have interrupted the exchange with other ranks."""

    step: int
    complete: torch.Tensor


class GlobalNorm(NamedTuple):
    """The result of NORM: `accepted`, a bool scalar, is false after an abort or without `has_room`; `norm` is then
    nan."""

    step: int
    accepted: torch.Tensor
    norm: torch.Tensor
    losses: torch.Tensor
    squared_lse: torch.Tensor
    has_room: torch.Tensor


class StepContext(NamedTuple):
    """What the end of a step needs of its rank; `cancelled` as in `_StepBase`."""

    plan: Plan
    groups: ProcessGroups
    stages: dict[int, BaseStage]
    spikes: SpikeFilter | None
    snapshots: Sequence[Snapshots]
    cancelled: torch.Tensor


class _StepBase:
    """`version` (on the device) is the number of steps in the master weights, `norm` that of the newest one.

    `cancelled`, a float64 scalar in pinned memory, is nan after `cancel`. Where an abort ends the waits of a host's
    ranks for each other, these ranks share it; ranks of other hosts learn of it through a sum (see `_meet`).
    """

    def __init__(self, context: StepContext) -> None:
        plan, groups, stages, self.spikes, self.snapshots, self.cancelled = context
        self.plan, self.stages, self.world = plan, stages, groups.world
        self.totals = StepTotals(plan, groups.rank, stages, groups.layers.ep.slots)
        self.device = self.totals.values.device
        self.version = torch.zeros((), dtype=torch.int64, device=self.device)
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self.committed: list[CommittedStep] = []
        self.muon = {
            shard: MuonExchange(plan, groups.rank, shard, groups.matrices[shard.stage][shard.experts])
            for shard in sorted(self._parameters() if groups.matrices else ())
        }
        self.directions: dict[ParamShard, torch.Tensor] = {}
        casts = ((stage.casts, groups.gradients[index][0]) for index, stage in sorted(stages.items()))
        self.histories = [(found.history, group) for found, group in casts if found and found.history]
        self.tp_group = groups.layers.tp.group

    def validate(self, check: Check) -> bool:
        """VALIDATE: commits the previous step. False if everything computed since must be discarded."""
        return True

    def cancel(self) -> None:
        """Prevents every commit that the GPU has not reached. From any thread; only writes host memory."""
        self.cancelled.fill_(math.nan)

    def forget(self) -> None:
        """Frees what only a commit of the last step needs. Called when W is about to overwrite that step's
        gradients."""
        self.directions.clear()

    def close(self) -> None:
        """Ends background work."""

    def compares(self, step: int) -> bool:
        """Whether the gradients of a step are compared with those in the compute dtype."""
        return self.plan.fp8 is not None and self.plan.fp8.compares(step)

    def kept_gradients(self) -> KeptGradients:
        """A copy of the gradients of a step that all ranks have completed except for NORM."""
        self._fill()
        shards = self.plan.param_shards_of(self.totals.rank)
        buffers = {shard: self.stages[shard.stage].param_buffers[shard.experts] for shard in shards}
        return KeptGradients(self.plan, self.totals.rank, buffers)

    def _fill(self) -> torch.Tensor:
        """This rank's entries of the totals, once its gradients are complete."""
        return self.totals.fill()

    def _reduce_maxima(self) -> None:
        """Reduces FP8 maxima before the totals leave this rank: if any rank commits a step, every rank has its
        maxima."""
        reduce_maxima(self.histories, self.tp_group)

    def _orthogonalize(self, step: int, norm: torch.Tensor) -> None:
        """Computes the directions of a step with this global norm, together with the ranks that hold parts of the same
        matrices."""
        parameters, spec = self._parameters(), self.plan.optimizer
        for shard, exchange in self.muon.items():  # in the same order on every rank
            each = parameters[shard]
            scale = optimizer.clip_scale(norm, spec.clip_norm, each.master.dtype)
            self.directions[shard] = optimizer.muon_directions(each, spec, step, scale)
            exchange.run(self.directions[shard])

    def _cancelled(self) -> torch.Tensor:
        """A float64 scalar, 0 or nan; on a GPU, its value when the current stream gets here."""
        return self.cancelled.to(self.device, non_blocking=True)

    def _meet(self, cancelled: torch.Tensor, check: Check, totals: torch.Tensor | None = None) -> torch.Tensor:
        """Waits for all ranks and sums their `totals` in place. Returns a bool scalar, false after an abort: if an
        abort had ended the waits of some rank before it got here, what that rank sent may be wrong, and its `cancelled`
        tells all others."""
        own = cancelled.view(1)
        sums = own.clone() if totals is None else torch.cat((totals, own))
        _sum(sums, self.world, check)
        if totals is not None:
            totals.copy_(sums[:-1])
        return (sums[-1] == 0) & (self._cancelled() == 0)

    def _taken(self, norm: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """The norm, or nan if the step is skipped."""
        if self.spikes is None:
            return norm
        assert losses.numel(), "whether a step is a spike depends on its losses"
        return self.spikes.filtered(self.totals.mean_loss(losses), norm)

    def _parameters(self) -> dict[ParamShard, Parameters]:
        shards = self.plan.param_shards_of(self.totals.rank)
        return {shard: self.stages[shard.stage].param_buffers[shard.experts].parameters for shard in shards}


class BarrierStep(_StepBase):
    """All ranks of the mesh meet at NORM: once one rank has the norm, the gradients of every rank are complete. With
    Muon they meet again when they have the orthogonalized directions, so that STEP needs no other rank.

    If a GPU has not reached STEP when `cancel` is called, STEP changes no weight, and the gradients stay intact: the
    host issues no W of the next step before this one has ended.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        plan, groups, stages, *_ = context
        self.tied = TiedEmbedding(plan, groups.rank, stages, groups.tied)
        # Sorted, because DualPipe's mirror ranks hold the same stages in a different order.
        balances = [(stage.load_balancer, groups.gradients[index][0]) for index, stage in sorted(stages.items())]
        self.balances = [(balance, group) for balance, group in balances if balance is not None and balance.rate]
        self.update: LocalUpdate | None = None
        self.global_norm: GlobalNorm | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the next step lacks only its global norm or, with Muon, only the meeting of all ranks."""
        found = self.update
        return found is not None and bool(found.complete) and int(self.version) == found.step

    def reduce_norm(self, step: int, check: Check) -> None:
        """NORM."""
        for balance, group in self.balances:
            balance.reduce(group)
        self._reduce_maxima()
        totals = self._fill()
        if self.muon:
            _sum(totals, self.world, check)
            self._orthogonalize(step, self.totals.norm(totals))
        cancelled = self._cancelled()
        self.update = LocalUpdate(step, cancelled == 0)
        accepted = self._meet(cancelled, check, None if self.muon else totals)
        has_room = self.totals.has_room(totals)
        accepted = accepted & has_room
        norm = torch.where(accepted, self.totals.norm(totals), torch.nan)
        sums = self.totals.losses(totals), self.totals.squared_lse(totals)
        self.global_norm = GlobalNorm(step, accepted, norm, *sums, has_room)

    def _fill(self) -> torch.Tensor:
        self.tied.reduce()
        return super()._fill()

    def step(self, step: int, check: Check) -> None:
        """STEP, scaled by the norm; changes nothing if the norm is not finite."""
        assert self.global_norm is not None and self.global_norm.step == step
        self._commit(self.global_norm)

    def commit(self, step: int, norm: float, losses: Sequence[float]) -> None:
        """Commits the step that lacked only its norm; another rank received the norm and the losses before the
        abort."""
        accepted = torch.ones((), dtype=torch.bool, device=self.device)
        of = partial(torch.tensor, dtype=torch.float64, device=self.device)
        self._commit(GlobalNorm(step, accepted, of(norm), of(losses), of((0.0, 0.0)), accepted))

    def _commit(self, result: GlobalNorm) -> None:
        with state_update(self.snapshots, result.step + 1):
            taken = self._update(result)
        losses, norm = _to_host(result.losses), _to_host(result.norm)
        taken = norm if self.spikes is None else _to_host(taken)
        rest = _to_host(result.squared_lse), _to_host(result.has_room)
        self.committed.append(CommittedStep(result.step, losses, norm, taken, *rest))

    def _update(self, result: GlobalNorm) -> torch.Tensor:
        """Changes the state; returns the norm, or nan if the step is skipped."""
        taken = self._taken(result.norm, result.losses)
        spec = self.plan.optimizer
        for shard, parameters in self._parameters().items():
            scale = optimizer.clip_scale(taken, spec.clip_norm, parameters.master.dtype)
            optimizer.step(parameters, spec, result.step, scale, self.directions.get(shard))
        for parameters in self._parameters().values():
            if parameters.host is not None:
                parameters.host.stream.finish()
        for balance, _ in self.balances:
            balance.update(result.accepted & taken.isfinite())
        for history, _ in self.histories:
            history.advance(result.accepted & taken.isfinite())
        self.version.copy_(torch.where(result.accepted, result.step + 1, self.version))
        self.norm = torch.where(result.accepted, result.norm, self.norm)
        return taken


class PostValidatedStep(_StepBase):
    """STEP updates only the compute weights; the master weights follow once the norm is known. Until then gradients and
    optimizer state stay as they were.

    If a step turns out to be clipped, the weights change again, and everything computed with them is lost. Clipped
    steps tend to follow each other: after one, STEP waits for the norm of its own step, and commits it.

    Muon orthogonalizes its matrices before the norm is known, assuming that it is within the limit. A clipped step has
    other directions: all ranks orthogonalize again when they validate it, and meet before any of them commits.
    """

    def __init__(self, context: StepContext, reducer: NormReducer) -> None:
        super().__init__(context)
        self.reducer = reducer
        assert self.totals.slots is None, "a step that has changed weights is not run again with more slots"
        self.unvalidated: int | None = None  # the step whose norm is not known yet
        self.clipped: LocalUpdate | None = None  # the newest step that was orthogonalized again
        self.valid = True  # whether the newest step with a known norm was left unclipped

    @property
    def is_ready(self) -> bool:
        return self.unvalidated is not None and self.unvalidated == self.reducer.newest_partial

    def reduce_norm(self, step: int, check: Check) -> None:
        """NORM: submits this rank's sums. If any rank commits a step, every rank has its directions."""
        self._reduce_maxima()
        totals = self._fill()
        self._orthogonalize(step, torch.zeros_like(self.norm, device=self.device))
        self.unvalidated = step
        if totals.device.type == "cpu":
            self.reducer.submit(NormPartial(step, totals.clone(), lambda: True))
            return
        sums = _to_host(totals)
        arrived = torch.cuda.Event()
        arrived.record()
        self.reducer.submit(NormPartial(step, sums, arrived.query))

    def step(self, step: int, check: Check) -> None:
        """STEP, as if the norm were within the limit, or once it is known."""
        if not self.valid:
            self.validate(check)
            return
        for shard, parameters in self._parameters().items():
            optimizer.optimistic_step(parameters, self.plan.optimizer, step, self.directions.get(shard))
        for history, _ in self.histories:
            history.look_ahead()

    def validate(self, check: Check) -> bool:
        """Waits for the norm. False if it is over the limit or not finite: the compute weights have then changed."""
        if self.unvalidated is None:
            return True
        # Each entry is nonzero in one pipeline only.
        totals = self.reducer.wait(self.unvalidated, check).sum(0)
        norm, sums = self.totals.norm(totals), (self.totals.losses(totals), self.totals.squared_lse(totals))
        accepted = self._orthogonalize_again(self.unvalidated, norm, check) if self._changes_directions(norm) else None
        self.valid = self._commit(self.unvalidated, norm, *sums, accepted)
        return self.valid

    def commit(self, step: int, norm: float, losses: Sequence[float]) -> None:
        values = [torch.tensor(each, dtype=torch.float64) for each in (norm, losses, (0.0, 0.0))]
        if self._changes_directions(values[0]):
            found = self.clipped
            if found is None or found.step != step or not found.complete:
                raise PentadError(f"step {step} was clipped, and its directions need the other ranks")
        self._commit(step, *values)

    def close(self) -> None:
        self.reducer.close()

    def _changes_directions(self, norm: torch.Tensor) -> bool:
        """Whether clipping makes the optimistic directions wrong."""
        return bool(self.muon) and bool(optimizer.clip_scale(norm, self.plan.optimizer.clip_norm, norm.dtype) < 1)

    def _orthogonalize_again(self, step: int, norm: torch.Tensor, check: Check) -> torch.Tensor:
        """Computes the directions of a clipped step. Returns a bool scalar, false after an abort; by then every rank
        has its directions."""
        self._orthogonalize(step, norm.to(self.device))
        cancelled = self._cancelled()
        self.clipped = LocalUpdate(step, cancelled == 0)
        return self._meet(cancelled, check)

    def _commit(
        self,
        step: int,
        norm: torch.Tensor,
        losses: torch.Tensor,
        squared_lse: torch.Tensor,
        accepted: torch.Tensor | None = None,
    ) -> bool:
        with state_update(self.snapshots, step + 1):
            taken, unscaled = self._update(step, norm, losses, accepted)
        self.norm, self.unvalidated = norm, None
        self.committed.append(CommittedStep(step, losses, norm, taken, squared_lse))
        return unscaled

    def _update(
        self, step: int, norm: torch.Tensor, losses: torch.Tensor, accepted: torch.Tensor | None
    ) -> tuple[torch.Tensor, bool]:
        """Changes the state unless the step is not `accepted`. Returns the norm, or nan if the step is skipped, and
        whether nothing was clipped."""
        parameters, taken = self._parameters(), self._taken(norm, losses)
        dtype = next(iter(parameters.values())).master.dtype
        factor = optimizer.clip_scale(taken, self.plan.optimizer.clip_norm, dtype)
        finite, unscaled = bool(factor.isfinite()), bool(factor == 1)
        scale, version = factor.to(self.device, non_blocking=True), torch.full_like(self.version, step + 1)
        if accepted is not None:
            scale, version = torch.where(accepted, scale, torch.nan), torch.where(accepted, version, self.version)
        for shard, each in parameters.items():
            if not finite:
                each.refresh()
            optimizer.step(each, self.plan.optimizer, step, scale, self.directions.get(shard))
        for history, _ in self.histories:
            history.advance(scale.isfinite())
        self.version.copy_(version)
        return taken, unscaled


OptimizerStep = BarrierStep | PostValidatedStep


def _sum(values: torch.Tensor, world: dist.ProcessGroup | None, check: Check) -> None:
    """Sums `values` over all ranks, in place."""
    if world is not None:
        with rank_waits.abandonable():
            dist.all_reduce(values, group=world)
    check()


def _to_host(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host, valid once the current stream has reached this point."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)
