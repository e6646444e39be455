"""Checks that gradients are complete when a reduction may start during the rest of a W.

On CPUs no reduction starts early, so results would not reveal a violation.
"""

from __future__ import annotations

import torch

from pentad.schedules.ir.instruction import Instruction, Key
from pentad.workers.parallel.async_ops import Task
from pentad.workers.runtime.executor import Executor


def watch_early_releases(executor: Executor) -> None:
    """Fails the rank if a bucket changes between its early release and its reduction."""
    released: dict[Key, list[torch.Tensor]] = {}
    real_release, real_execute = executor.lanes.release_early, executor._execute

    def buckets(reduction: Instruction) -> list[torch.Tensor]:
        buffers, index = executor.stages[reduction.stage].param_buffers, max(0, reduction.microbatch)
        return [each.gradients.flat[each.buckets[index].span] for each in buffers if each.gradients is not None]

    def release_early(part: Instruction, reader: Instruction) -> None:
        real_release(part, reader)
        if reader.key not in released:
            released[reader.key] = [bucket.clone() for bucket in buckets(reader)]

    def execute(part: Instruction) -> Task[None]:
        if part.key in released:
            for before, now in zip(released.pop(part.key), buckets(part), strict=True):
                assert torch.equal(before, now), f"{part} was released before its bucket was complete"
        yield from real_execute(part)

    executor.lanes.release_early, executor._execute = release_early, execute  # type: ignore[method-assign]
