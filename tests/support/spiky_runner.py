"""A Runner whose gradient norm is a thousand times too large on one batch, and one that never sees that batch."""

from __future__ import annotations

from typing import Any

from pentad.workers.params import optimizer
from pentad.workers.runtime.results import StepResult
from pentad.workers.runtime.runner import Runner

SPIKE_BATCH = 9
SKIPPED = ((8, 2),)  # what a rollback to step 8 leaves out


class SpikyRunner(Runner):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        load, square_sum = self.load_batch, optimizer.square_sum
        self.batch = -1

        def load_batch(batch: int, *more: Any) -> Any:
            self.batch = batch
            return load(batch, *more)

        def spiky_sum(*values: Any) -> Any:
            return square_sum(*values) * (1e6 if self.batch == SPIKE_BATCH else 1.0)

        self.load_batch, optimizer.square_sum = load_batch, spiky_sum  # type: ignore[assignment]


class SkippingRunner(Runner):
    def run(self, first_step: int, count: int, more: bool = False, skipped_batches: Any = ()) -> list[StepResult]:
        assert skipped_batches == ()
        return super().run(first_step, count, more, SKIPPED)
