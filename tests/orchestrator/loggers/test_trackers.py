"""What the loggers of MLflow and W&B send to fakes of these packages; test_services.py uses the packages themselves."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_trackers import MlflowStore, WandbService, fake_mlflow, fake_wandb

from pentad.orchestrator.loggers.logger import LoggedRun
from pentad.orchestrator.loggers.process import serve

LOSSES = {0: 9.0, 1: 8.0, 2: 5.0}
MLFLOW = {"tracking_uri": None, "experiment": "pentad"}
WANDB = {"project": "pentad", "entity": None, "mode": "online"}
MANY = {f"section{number}": {"key": number} for number in range(250)}


@pytest.fixture(autouse=True)
def real_modules_again() -> Iterator[None]:
    """Unloads loggers that were imported with a fake, so that no later test gets them."""
    yield
    for name in ("mlflow", "wandb"):
        sys.modules.pop(f"pentad.orchestrator.loggers.{name}", None)


def session(
    kind: str, folder: Path, settings: dict[str, Any], first: int = 0, end: str | None = "stopped"
) -> list[str]:
    """A run that logs LOSSES from `first` on, each step with 300 more values; returns its notes."""
    (folder / "loggers").mkdir(exist_ok=True)
    run = LoggedRun("trial", str(folder), first, first, {"run": {"name": "trial"}, **MANY}, settings)
    many = {f"value{number}": 0.5 for number in range(300)}
    rows = [{"row": {"step": step, "time": 1e9 + step, "loss": loss, **many}} for step, loss in LOSSES.items()]
    saved = {"checkpoint": "checkpoints/step-00000002", "step": 2}
    notes: list[str] = []
    serve(kind, [run._asdict(), *rows[first:], saved, *([{"end": end}] if end else [])], notes.append)
    return notes


@pytest.mark.parametrize("racing", [False, True])
def test_mlflow_gets_each_value_once_at_its_step_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, racing: bool
) -> None:
    fake_mlflow(monkeypatch, store := MlflowStore(racing))
    (tmp_path / "timeline.html").write_text("page")
    assert session("mlflow", tmp_path, MLFLOW) == []
    losses = [each for each in store.metrics if each.key == "train/loss"]
    assert [(each.step, each.timestamp, each.value) for each in losses] == [
        (step, 10**12 + 1000 * step, loss) for step, loss in LOSSES.items()
    ]
    assert len(store.metrics) == len(set(store.metrics)) == 3 * 301
    assert store.params == {"run.name": '"trial"'} | {f"section{number}.key": f"{number}" for number in range(250)}
    assert store.tags == {"checkpoint": "checkpoints/step-00000002"} and store.artifacts == ["timeline.html"]


def test_a_resumed_mlflow_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are not sent again, as MLflow does not allow changes."""
    fake_mlflow(monkeypatch, store := MlflowStore())
    session("mlflow", tmp_path, MLFLOW)
    session("mlflow", tmp_path, MLFLOW, first=2, end="finished")
    session("mlflow", tmp_path, MLFLOW, first=3, end=None)  # the driver dies
    assert store.runs == ["trial"]
    assert store.statuses == ["KILLED", "RUNNING", "FINISHED", "RUNNING", "FAILED"]
    assert [each.step for each in store.metrics if each.key == "train/loss"] == [0, 1, 2, 2]


@pytest.mark.parametrize("has_network", [True, False])
def test_wandb_drops_no_row_of_a_run_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_network: bool
) -> None:
    """W&B drops rows with an earlier step than its newest one, so its steps count rows, across resumes."""
    fake_wandb(monkeypatch, service := WandbService(has_network))
    notes = session("wandb", tmp_path, WANDB)
    (tmp_path / "timeline.html").write_text("page")
    notes += session("wandb", tmp_path, WANDB, first=1, end="failed")
    (rows,) = service.rows.values()
    assert [(each["step"], each["train/loss"]) for each in rows if "step" in each] == [
        *LOSSES.items(),
        (1, 8.0),
        (2, 5.0),
    ]
    assert rows[-1]["timeline"].endswith("timeline.html") and [each["_step"] for each in rows] == [*range(6)]
    assert service.exit_codes == [0, 1]
    assert service.modes == [*(["online"] if has_network else ["offline"])] * 2
    expected = f"W&B logs offline (no network); `wandb sync {tmp_path}/wandb/offline-run-*` uploads it later"
    assert notes == ([] if has_network else [expected, expected])
