"""A setting as `pentad plan` plans it: the search's ground truth."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import fullest_bytes, simulated_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.space import Setting, with_setting
from pentad.schedules.spec.plan import Plan


@dataclass(frozen=True)
class Planned:
    """A setting as `pentad plan` plans it: seconds of a step, and bytes of its fullest rank."""

    setting: Setting
    config: RunConfig
    plan: Plan
    seconds: float
    bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.plan.batch.tokens / self.seconds


def plan_setting(config: RunConfig, setting: Setting, held: Collection[str]) -> Planned:
    """Whether it fits or not. Raises PentadError if it is impossible."""
    changed = with_setting(without_evaluation(config), setting, held)
    plan = make_plan(changed, "cuda", proved=False)
    return Planned(setting, changed, plan, simulated_seconds(plan), fullest_bytes(plan, 2**62))


def without_evaluation(config: RunConfig) -> RunConfig:
    """The configuration of a run that is never evaluated: its training decides on the plan."""
    data = config.data.model_copy(update={"holdout": 0})
    evaluation = config.eval.model_copy(update={"data": None, "every": 0, "at_start": False})
    checkpoint = config.checkpoint.model_copy(update={"keep_best": False})
    return config.model_copy(update={"data": data, "eval": evaluation, "checkpoint": checkpoint})
