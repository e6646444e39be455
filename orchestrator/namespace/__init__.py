"""pentad from Python: train, plan and schedule, and read runs and checkpoints (docs/python.md).

    import pentad

    run = pentad.train("run.yaml", mesh={"pp": 4}, on_step=print)
    run.metrics().to_pandas().plot(x="step", y="loss")

This folder is the package `pentad` itself (pyproject.toml, .typings). A name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentad.orchestrator.api.checkpoints import load_checkpoint
    from pentad.orchestrator.api.comparison import Comparison
    from pentad.orchestrator.api.configs import load_config
    from pentad.orchestrator.api.curves import Curves
    from pentad.orchestrator.api.evaluation import evaluate
    from pentad.orchestrator.api.plans import PlannedRun, plan
    from pentad.orchestrator.api.runs import Run
    from pentad.orchestrator.api.schedules import Schedule, schedule
    from pentad.orchestrator.api.training import train
    from pentad.orchestrator.config.config import RunConfig
    from pentad.orchestrator.run.interrupts import StopTraining
    from pentad.schedules.ir.errors import PentadError, ScheduleError

    __version__: str

_MODULES = {
    "Comparison": "pentad.orchestrator.api.comparison",
    "Curves": "pentad.orchestrator.api.curves",
    "PentadError": "pentad.schedules.ir.errors",
    "PlannedRun": "pentad.orchestrator.api.plans",
    "Run": "pentad.orchestrator.api.runs",
    "RunConfig": "pentad.orchestrator.config.config",
    "Schedule": "pentad.orchestrator.api.schedules",
    "ScheduleError": "pentad.schedules.ir.errors",
    "StopTraining": "pentad.orchestrator.run.interrupts",
    "evaluate": "pentad.orchestrator.api.evaluation",
    "load_checkpoint": "pentad.orchestrator.api.checkpoints",
    "load_config": "pentad.orchestrator.api.configs",
    "plan": "pentad.orchestrator.api.plans",
    "schedule": "pentad.orchestrator.api.schedules",
    "train": "pentad.orchestrator.api.training",
}

__all__ = [
    "Comparison",
    "Curves",
    "PentadError",
    "PlannedRun",
    "Run",
    "RunConfig",
    "Schedule",
    "ScheduleError",
    "StopTraining",
    "evaluate",
    "load_checkpoint",
    "load_config",
    "plan",
    "schedule",
    "train",
]


if not TYPE_CHECKING:  # otherwise a type checker would believe that any name exists

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from pentad.orchestrator.config.version import release

            return release()
        if name not in _MODULES:
            raise AttributeError(f"module 'pentad' has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
