"""The section of spikes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat

from pentad.orchestrator.config.errors import Broken
from pentad.orchestrator.config.sections import Count, Section
from pentad.schedules.spec.spikes import SpikeSpec


class SpikesSection(Section):
    """Steps whose loss or gradient norm is not finite or a spike: far above that of the steps before
    (docs/recovery.md)."""

    policy: Literal["none", "skip", "rollback", "stop"] = "none"
    """skip: such a step changes no weight; stop: the run stops as well; rollback: the run goes back to the last
    checkpoint by steps and leaves out the batches since; none: only a step with a gradient norm that is not finite
    changes no weight"""
    threshold: PositiveFloat = 6.0
    """standard deviations above the mean of the window from which on a value is a spike"""
    window: int = Field(default=128, ge=2, description="steps that a step is compared with, the latest ones")
    min_steps: int = Field(default=64, ge=2, description="steps in the window before any step can be a spike")
    max_consecutive: Count = 10
    """such steps in a row, or rollbacks to the same checkpoint, after which the run fails"""

    def rules(self) -> Iterator[Broken | str]:
        if self.min_steps > self.window:
            yield Broken("min_steps", f"at most spikes.window = {self.window}")

    @property
    def spec(self) -> SpikeSpec | None:
        """None where ranks need not look for spikes."""
        return None if self.policy == "none" else SpikeSpec(self.threshold, self.window, self.min_steps)
