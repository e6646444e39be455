"""Holds a rank to its word that a reduction may begin beside a W: on CPU none does, and no result would tell."""

from __future__ import annotations

import torch

from pentad.schedules.ir.instruction import Instruction, Key
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.runtime.executor import Executor


def watch(executor: Executor) -> None:
    """The rank fails when a reduction finds other gradients than there were when it might have begun."""
    found: dict[Key, list[torch.Tensor]] = {}
    leave, turns = executor.lanes.leave, executor._turns

    def parts(reduction: Instruction) -> list[torch.Tensor]:
        banks, number = executor.stages[reduction.stage].banks, max(0, reduction.microbatch)
        return [bank.whole[bank.buckets[number].span] for bank in banks if bank.whole is not None]

    def left(part: Instruction, reader: Instruction) -> None:
        leave(part, reader)
        if reader.key not in found:
            found[reader.key] = [each.clone() for each in parts(reader)]

    def checked(part: Instruction) -> Turns[None]:
        if part.key in found:
            for then, now in zip(found.pop(part.key), parts(part), strict=True):
                assert torch.equal(then, now), f"{part} might have begun before its bucket was whole"
        yield from turns(part)

    executor.lanes.leave, executor._turns = left, checked  # type: ignore[method-assign]
