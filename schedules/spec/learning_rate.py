"""The learning rate of every step: a linear warm-up, then one of six curves down to a minimum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt", "wsd"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class LearningRate:
    """A curve of `decay_steps` steps, warm-up included; later steps keep its last value.

    Step `warmup_steps` - 1 is the first at `peak`, and step `decay_steps` the first at `minimum`, so that every step of
    the curve learns: step 0 has peak / warmup_steps. 'inverse_sqrt' approaches `minimum` instead, and 'constant' stays
    at `peak`. With 'wsd' (warm-up, stable, decay; arXiv 2404.06395), `stable_steps` follow the warm-up at `peak`, and
    the rest decays in `decay_shape` ('1-sqrt': arXiv 2405.18392). 'cosine_with_restarts' (arXiv 1608.03983) has
    `cycles` of equal length, each from `peak`.
    """

    peak: float
    minimum: float
    warmup_steps: int
    decay_steps: int
    schedule: ScheduleName = "cosine"
    stable_steps: int = 0
    decay_shape: DecayShape = "linear"
    cycles: int = 1

    def at(self, step: int) -> float:
        """Learning rate of a step, counted from 0: a pure function, so all ranks and a resumed run agree."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.minimum + (self.peak - self.minimum) * self._height(step - self.warmup_steps)

    def _height(self, step: int) -> float:
        """From 1 at the peak to 0 at the minimum, `step` steps after the warm-up."""
        length = self.decay_steps - self.warmup_steps
        match self.schedule:
            case "constant":
                return 1.0
            case "inverse_sqrt":
                timescale = max(1, self.warmup_steps)
                return math.sqrt(timescale / (timescale + step))
            case "wsd":
                return _decayed(self.decay_shape, _progress(step - self.stable_steps, length - self.stable_steps))
            case "cosine_with_restarts":
                progress = _progress(step, length)
                return _decayed("cosine", progress * self.cycles % 1 if progress < 1 else 1.0)
            case "linear" | "cosine":
                return _decayed(self.schedule, _progress(step, length))


def _progress(step: int, length: int) -> float:
    return min(1.0, max(0, step) / max(1, length))


def _decayed(shape: DecayShape, progress: float) -> float:
    match shape:
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "1-sqrt":
            return 1 - math.sqrt(progress)
