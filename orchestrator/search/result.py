"""What a search has found: settings as `pentad plan` plans them, and refusals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import fullest_bytes, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.space import Setting, Space, with_setting
from pentad.schedules.spec.mesh import Mesh
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
    """Plans a setting whether it fits or not. Raises PentadError if it is impossible."""
    changed = with_setting(without_evaluation(config), setting, held)
    plan = make_plan(changed, "cuda", proved=False)
    return Planned(setting, changed, plan, simulated_seconds(plan), fullest_bytes(plan, 2**62))


def without_evaluation(config: RunConfig) -> RunConfig:
    """The configuration of the run without evaluations: plans are compared by their training."""
    data = config.data.model_copy(update={"holdout": 0})
    evaluation = config.eval.model_copy(update={"data": None, "every": 0, "at_start": False})
    checkpoint = config.checkpoint.model_copy(update={"keep_best": False})
    return config.model_copy(update={"data": data, "eval": evaluation, "checkpoint": checkpoint})


@dataclass(frozen=True)
class Refusal:
    """Why no setting of a mesh was listed, as a sentence; and the bytes that each needs at least, if memory is the
    reason."""

    why: str
    least_bytes: int = 0

    @classmethod
    def for_memory(cls, mesh: Mesh, available: int, least: int) -> Refusal:
        here, needed = (f"{each / 2**30:.2f} GiB" for each in (available, least))
        return cls(f"memory is {here} a rank: expected more than {needed} for mesh {mesh}", least)


class Missed(NamedTuple):
    """A setting that does not fit, and a lower bound on its seconds."""

    setting: Setting
    seconds: float


@dataclass
class SearchResult:
    """The fastest plan of each of the best meshes, best first. `refusals` are by mesh; `missed` may be the fastest of
    the settings that do not fit; `planned` counts the settings that were planned."""

    device: DeviceMemory
    space: Space
    held: Collection[str] = ()
    choices: list[Planned] = field(default_factory=list)
    refusals: dict[Mesh, Refusal] = field(default_factory=dict)
    missed: Missed | None = None
    planned: int = 0

    @property
    def num_possible(self) -> int:
        return len(self.space.meshes) - len(self.refusals)
