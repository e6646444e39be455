"""What counts as a spike, and which batches a run leaves out because of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SpikeSpec:
    """A step is a spike if its loss or gradient norm is more than `threshold` standard deviations above the mean of the
    last `window` steps, once there are `min_steps` of them."""

    threshold: float
    window: int
    min_steps: int


def batch_of(step: int, skipped: Sequence[tuple[int, int]]) -> int:
    """The batch, from 0, that a step trains on: before step `first` of each (first, count) in `skipped` as many batches
    are left out. A pure function, so a resumed or repaired run trains on the same samples."""
    return step + sum(count for first, count in skipped if first <= step)
