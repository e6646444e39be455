"""MLflow: a tracking server, or files in the folder `mlruns` beside the runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pentad.orchestrator.loggers.logger import LoggedRun, Logger, Note

STATE, ARTIFACTS = "loggers/mlflow.json", ("config.yaml", "timeline.html", "trace.json.gz")
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
FLUSH_SECONDS, FLUSH_METRICS = 5.0, 500  # when to send a request; MLflow takes at most 1000 metrics in one
MOST_PARAMS = 100  # MLflow's limit for a request
MOST_CHARACTERS = 6000  # MLflow's limit for a parameter


class Mlflow(Logger):
    """One MLflow run for all resumes. MLflow keeps every value, so steps that run again appear twice."""

    def __init__(self, run: LoggedRun, note: Note) -> None:
        self.folder, self.metrics, self.flushed = Path(run.folder), list[Metric](), time.monotonic()
        self.client = MlflowClient(_tracking_uri(run))
        self.id = self._resume(run)
        known = self.client.get_run(self.id).data.params  # MLflow forbids changes; config.yaml has the present values
        params = [Param(key, value) for key, value in _flat(run.config).items() if key not in known]
        for first in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.id, params=params[first : first + MOST_PARAMS])

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        self.metrics += [Metric(name, float(value), int(1e3 * time), step) for name, value in values.items()]
        self._flush()

    def checkpoint(self, step: int, folder: str) -> None:
        self.client.set_tag(self.id, "checkpoint", folder)

    def close(self, state: str) -> None:
        self._flush(force=True)
        for name in ARTIFACTS:
            if (self.folder / name).exists():
                self.client.log_artifact(self.id, str(self.folder / name))
        self.client.set_terminated(self.id, STATUS.get(state, "FAILED"))

    def _resume(self, run: LoggedRun) -> str:
        path = self.folder / STATE
        if path.exists():
            found: str = json.loads(path.read_text())["id"]
            self.client.update_run(found, status="RUNNING")
            return found
        created: str = self.client.create_run(_experiment(self.client, run), run_name=run.name).info.run_id
        path.write_text(json.dumps({"id": created}))
        return created

    def _flush(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self.metrics and (force or len(self.metrics) >= FLUSH_METRICS or now - self.flushed >= FLUSH_SECONDS):
            while self.metrics:
                self.client.log_batch(self.id, metrics=self.metrics[:FLUSH_METRICS])
                del self.metrics[:FLUSH_METRICS]
            self.flushed = now


def _tracking_uri(run: LoggedRun) -> str:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3.18 and later refuse files otherwise
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default of 7 takes minutes
    given = run.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    return given or (Path(run.folder).parent / "mlruns").as_uri()


def _experiment(client: MlflowClient, run: LoggedRun) -> str:
    name = run.settings["experiment"]
    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:  # another run has just created it
        if found := client.get_experiment_by_name(name):
            return found.experiment_id
        raise


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The configuration with dotted keys, as on the command line, and values as JSON."""
    found = dict[str, str]()
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value)[:MOST_CHARACTERS]
    return found
