"""Stand-ins for the packages mlflow and wandb: they keep what they get, and refuse what the real ones refuse."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

MOST_OF_A_REQUEST = {"metrics": 1000, "params": 100}  # of MLflow's REST interface


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class MlflowException(Exception): ...


@dataclass
class MlflowStore:
    """A tracking server with at most one experiment, and its runs. If `racing`, someone else creates the experiment
    just before us."""

    racing: bool = False
    experiment: str | None = None
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    requests: int = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.experiment == name else None

    def create_experiment(self, name: str) -> str:
        self.experiment = name
        if self.racing:
            raise MlflowException(f"{name} exists")
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert experiment == "7"
        self.runs.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs))))

    def get_run(self, run: str) -> Any:
        assert run == "1"
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.params)))

    def update_run(self, run: str, status: str) -> None:
        self.statuses.append(status)

    def log_batch(self, run: str, metrics: list[Metric] = [], params: list[Param] = []) -> None:  # noqa: B006
        assert len(metrics) <= MOST_OF_A_REQUEST["metrics"] and len(params) <= MOST_OF_A_REQUEST["params"]
        for key, value in params:
            if self.params.setdefault(key, value) != value:
                raise MlflowException(f"{key} cannot change")
        self.metrics += metrics
        self.requests += 1

    def set_tag(self, run: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_artifact(self, run: str, path: str) -> None:
        self.artifacts.append(Path(path).name)

    def set_terminated(self, run: str, status: str) -> None:
        self.statuses.append(status)


class WandbError(Exception): ...


@dataclass
class WandbService:
    """Runs by ID, and what each has logged. Without a network there are only offline runs, which begin at step 0."""

    has_network: bool = True
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    modes: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def init(self, mode: str, id: str, resume: str | None = None, **options: Any) -> WandbRun:
        if mode == "online" and not self.has_network:
            raise WandbError("no network\nand more lines")
        self.modes.append(mode)
        return WandbRun(self, self.rows.setdefault(id, []), is_online=mode == "online")


class WandbRun:
    def __init__(self, service: WandbService, rows: list[dict[str, Any]], *, is_online: bool) -> None:
        self.service, self.rows, self.summary = service, rows, dict[str, str]()
        self.step = len(rows) if is_online else 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, Any], step: int) -> None:
        """W&B drops rows of steps before its newest one."""
        if not self.rows or step > self.rows[-1]["_step"]:
            self.rows.append({**values, "_step": step})

    def finish(self, exit_code: int) -> None:
        self.service.exit_codes.append(exit_code)


def _put(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)


def fake_mlflow(patch: pytest.MonkeyPatch, store: MlflowStore) -> None:
    _put(patch, "mlflow")
    _put(patch, "mlflow.entities", Metric=Metric, Param=Param)
    _put(patch, "mlflow.exceptions", MlflowException=MlflowException)
    _put(patch, "mlflow.tracking", MlflowClient=lambda uri: store)
    patch.delitem(sys.modules, "pentad.orchestrator.loggers.mlflow", raising=False)


def fake_wandb(patch: pytest.MonkeyPatch, service: WandbService) -> None:
    settings = lambda **options: options  # noqa: E731
    content = {"Settings": settings, "Error": WandbError, "Html": str, "teardown": lambda: None, "init": service.init}
    _put(patch, "wandb", **content)
    patch.delitem(sys.modules, "pentad.orchestrator.loggers.wandb", raising=False)
