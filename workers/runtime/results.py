"""What workers tell the driver: plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from pentad.schedules.simulate.timeline import Span


@dataclass(frozen=True)
class StepResult:
    """One rank's account of one step.

    `losses` maps microbatch numbers of the whole mesh to the sums of their tokens' losses. `grad_norm` is the global
    norm before clipping; `skipped` says that it was not finite and no weight changed. `spans` are times in seconds on
    the host's monotonic clock, ranks and peers are ranks of the mesh. `host_seconds` is what the host needed to issue
    the step, `instructions` how many it issued.
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


@dataclass(frozen=True)
class RankSnapshot:
    """Where a rank stands after its generation was ended from outside.

    `version` steps are in its weights. `ready` says that its gradients of the next step are whole, so that the step's
    global norm is all that it lacks; `norm` is that of the last step in its weights. `results` are of the last steps
    done, some of which the driver may have.
    """

    version: int
    ready: bool
    norm: float
    results: tuple[StepResult, ...]
