"""A Runner in which rank 1 of the first generation misbehaves: a bit of its weights flips before a step, or its first
result of a kind is wrong."""

from __future__ import annotations

from typing import Any

from bit_flips import flip

from pentad.workers.integrity.result import RankCheck
from pentad.workers.runtime.results import StepResult
from pentad.workers.runtime.runner import Runner

FLIPPED_BEFORE = 9  # the step


class FlippedWeights(Runner):
    is_flipped = False

    def run(self, first_step: int, count: int, more: bool = False, skipped_batches: Any = ()) -> list[StepResult]:
        if (self.rank, self.generation) == (1, 1) and first_step + count > FLIPPED_BEFORE and not self.is_flipped:
            flip(self, "master")
            self.is_flipped = True
        return super().run(first_step, count, more, skipped_batches)


class WrongOnce(Runner):
    def check(self, step: int) -> RankCheck:
        if (self.rank, self.generation, step) == (1, 1, 12):
            flip(self, "W once")
        return super().check(step)
