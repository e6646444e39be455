"""Loss, gradient norm, throughput and memory by step, in few enough points for a page, however long the run."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

KEYS = ("loss", "grad_norm", "tokens_per_second", "peak_bytes")
MOST_POINTS = 400


class StepCurves:
    """Values of steps in ascending order; NaN where a row of metrics.jsonl has none."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.steps = array("q")
        self.columns = {key: array("d") for key in KEYS}
        self.add(rows)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.steps.append(row["step"])
            for key, column in self.columns.items():
                value = row.get(key)
                column.append(math.nan if value is None else value)

    def rewind(self, step: int) -> None:
        """Drops this step and later ones, which will run again."""
        kept = bisect_left(self.steps, step)
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]

    def copy(self) -> StepCurves:
        """A copy, which is fast, unlike `points`."""
        made = StepCurves()
        made.steps, made.columns = self.steps[:], {key: column[:] for key, column in self.columns.items()}
        return made

    def points(self) -> dict[str, Any]:
        """The first step of each window of `width` steps, and the means over the windows; None where no step has a
        value."""
        width = max(1, -(-len(self.steps) // MOST_POINTS))
        starts = range(0, len(self.steps), width)
        found: dict[str, Any] = {"width": width, "step": [self.steps[at] for at in starts]}
        for key, column in self.columns.items():
            found[key] = [_mean(column[at : at + width]) for at in starts]
        return found


def _mean(values: array[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
