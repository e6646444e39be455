"""What the evaluations of a run cost: the simulated round of the forward-only program, and its share of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pentad.orchestrator.activations.activation_peaks import activation_peak
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import costs_of, memories, step_seconds
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan


@dataclass(frozen=True)
class EvalCost:
    """`round` is a simulated run of the forward-only program on one global batch of a data set. An evaluation has
    `rounds` of them (None: unknown), and the run `count` evaluations, one after every `every` steps (0: only at the
    end). By pipeline rank, `activations` are the peak bytes in a round, and `extra_bytes` what a rank needs beyond a
    run without evaluations."""

    round: Timeline
    rounds: int | None
    every: int
    count: int
    activations: tuple[int, ...]
    extra_bytes: tuple[int, ...]

    @property
    def round_seconds(self) -> float:
        return step_seconds(self.round)

    @property
    def seconds(self) -> float | None:
        """Seconds of one evaluation, whose rounds do not overlap."""
        return None if self.rounds is None else self.rounds * self.round_seconds

    def share(self, training_seconds: float) -> float | None:
        """The share of a run's time that evaluations take if training takes `training_seconds`."""
        if self.seconds is None:
            return None
        evaluating = self.count * self.seconds
        return evaluating / (evaluating + training_seconds)


def eval_cost(config: RunConfig, plan: Plan, costs: Costs, sequences: Sequence[int | None]) -> EvalCost | None:
    """What the evaluations of a plan cost; None if it has none. `sequences` are the numbers read from each data set
    (None: unknown)."""
    if plan.eval is None:
        return None
    batch, ranks = plan.batch.global_batch_size, plan.mesh.group(("pp",), 0)
    needed, trained = memories(plan), memories(replace(plan, eval=None))
    known = [count for count in sequences if count is not None]
    return EvalCost(
        # no backward follows that would read gradients of chunks of logits
        round=simulate(plan.eval.program, costs_of(replace(plan, logit_rows=0)) if plan.logit_rows else costs),
        rounds=sum(-(-count // batch) for count in known) if len(known) == len(sequences) else None,
        every=config.eval.every,
        count=config.eval.count(config.run.steps),
        activations=tuple(activation_peak(plan, plan.eval.program, rank).device for rank in ranks),
        extra_bytes=tuple(needed[rank]["total"] - trained[rank]["total"] for rank in ranks),
    )
