"""What workers tell the driver: plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from pentad.schedules.timeline import Span


@dataclass(frozen=True)
class StepResult:
    """One rank's account of one step.

    `losses` maps a global microbatch number to the sum of its tokens' losses, on ranks with the last stage, else it is
    empty. `grad_norm` is the global norm before clipping; `skipped` says that it was not finite and no weight changed.
    `spans` are times in seconds on the host's monotonic clock, ranks and peers are ranks of the mesh. `host_seconds` is
    what the host needed to issue the step, `instructions` how many it issued.
    """

    step: int
    losses: dict[int, float]
    grad_norm: float
    learning_rate: float
    skipped: bool
    spans: tuple[Span, ...]
    host_seconds: float
    instructions: int
    peak_bytes: int
