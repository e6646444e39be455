"""The result of one rank's step, from what its executor has recorded."""

from __future__ import annotations

import torch

from pentad.schedules.simulate.step_profile import RankProfile
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.samples import DIGEST_BITS
from pentad.workers.lanes.gpu_timer import StepTimes, spans_of
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.optimizer_step import CommittedStep
from pentad.workers.runtime.results import StepResult, sums_by_source


def step_result(
    executor: Executor,
    plan: Plan,
    rank: int,
    committed: CommittedStep,
    times: StepTimes,
    data_wait_seconds: float,
    profile: RankProfile | None,
) -> StepResult:
    """The result of a step that has ended, for whose data the host waited `data_wait_seconds`. The executor forgets the
    step."""
    batch, step, slots = plan.batch, committed.step, executor.groups.layers.ep.slots
    issued, device = executor.issued.pop(step), executor.optimizer_step.device
    largest = committed.losses[: batch.global_batch_size].view(batch.replicas, batch.microbatches, -1)
    losses = issued.by_row(largest[:, : issued.program.microbatches].flatten())
    return StepResult(
        step=step,
        program=issued.program.number,
        losses=dict(enumerate(losses.view(-1, batch.micro_batch_size).sum(1).tolist())),
        sources=sums_by_source(losses.numpy(), issued.row_sources, committed.losses[batch.global_batch_size : -1]),
        samples=int(committed.losses[-1]) % 2**DIGEST_BITS,
        fp8=tuple(each for stage in executor.fp8_samples.pop(step, ()) for each in stage.read()),
        fp8_gradients=executor.take_gradient_sums(step),
        **dict(zip(("squared_lse", "router_squared_lse"), committed.squared_lse.tolist(), strict=True)),
        grad_norm=float(committed.norm),
        learning_rate=plan.optimizer.learning_rate.at(step),
        skipped=not bool(committed.taken.isfinite()),
        spans=spans_of(plan, rank, step, times),
        **executor.lanes.take_waits(),
        expert_load=executor.take_expert_load(step),
        expert_slots=0 if slots is None else slots.tokens,
        data_wait_seconds=data_wait_seconds,
        profile=profile,
        host_seconds=executor.host_seconds.pop(step, 0.0),
        instructions=len(times),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )
