"""Loggers, checked with the libraries that read what they wrote; each is skipped if its library is not installed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import mlflow_server
from paths import ROOT
from wandb_files import history

from pentad.orchestrator.loggers.logger import LoggedRun
from pentad.orchestrator.loggers.process import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = {"run": {"name": "trial", "steps": 4}, "loggers": {"use": ["wandb"]}}
NOT_LISTENING = "http://127.0.0.1:9"
MLFLOW_PORT = 21_390


def row(step: int, loss: float | None) -> dict[str, Any]:
    return {"row": {"step": step, "time": 1e9 + step, "loss": loss}}


def messages(folder: Path, first: int, settings: dict[str, Any], *parts: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "loggers").mkdir(exist_ok=True)
    return [LoggedRun("trial", str(folder), first, first, CONFIG, settings)._asdict(), *parts]


def logged(kind: str, *sent: dict[str, Any]) -> list[str]:
    """Sends messages to the process of a logger; returns its notes."""
    command = [sys.executable, "-m", "pentad.orchestrator.loggers.process", kind]
    lines = "".join(json.dumps(message) + "\n" for message in sent)
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def session(kind: str, folder: Path, settings: dict[str, Any]) -> list[str]:
    """A run with a rewind that is then resumed. The final losses of steps 0 to 3 are 9, 6, 3, 2; returns its notes."""
    saved = {"checkpoint": "checkpoints/step-00000002", "step": 2}
    begun = row(0, 9.0), row(1, 8.0), {"rewind": 1}, row(1, 6.0), row(2, 5.0), saved, {"end": "stopped"}
    notes = logged(kind, *messages(folder, 0, settings, *begun))
    shutil.copy(ROOT / "README.md", folder / "timeline.html")
    resumed = row(2, 3.0), row(3, 2.0), row(4, None), {"end": "finished"}
    return notes + logged(kind, *messages(folder, 2, settings, *resumed))


def test_tensorboard_shows_every_step_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert session("tensorboard", tmp_path, {}) == []
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(each.step, each.wall_time, each.value) for each in found.Scalars("train/loss")]
    assert losses == [(0, 1e9, 9.0), (1, 1e9 + 1, 6.0), (2, 1e9 + 2, 3.0), (3, 1e9 + 3, 2.0)]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_never_goes_backwards_and_loses_nothing_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("WANDB_BASE_URL", NOT_LISTENING)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    notes = session("wandb", tmp_path, {"project": "pentad", "entity": None, "mode": mode})
    found = [each for each in history(tmp_path / "wandb") if "train/loss" in each]
    assert [(each["step"], each["train/loss"]) for each in found] == [
        *[(0, 9.0), (1, 8.0), (1, 6.0), (2, 5.0)],
        *[(2, 3.0), (3, 2.0)],
    ]
    assert [each["_step"] for each in found] == list(range(6))
    assert len({each["id"] for each in found}) == 1
    if mode == "offline":
        assert notes == []
    else:
        assert len(notes) == 2
        assert all(note.startswith("W&B logs offline (") for note in notes)
        assert f"wandb sync {tmp_path}/wandb/offline-run-*" in notes[0]


def test_wandb_without_a_key_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    settings = {"project": "pentad", "entity": None, "mode": "online"}
    (note,) = logged("wandb", *messages(tmp_path, 0, settings, row(0, 1.0), {"end": "finished"}))
    assert "No API key" in note
    assert [each["train/loss"] for each in history(tmp_path / "wandb") if "train/loss" in each] == [1.0]


def test_mlflow_has_one_run_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_mlflow(tmp_path, None, (tmp_path / "mlruns").as_uri())


def test_mlflow_has_one_run_on_a_server(tmp_path: Path) -> None:
    for package in ("mlflow", "flask", "flask_cors", "sqlalchemy", "alembic", "pandas"):
        pytest.importorskip(package)
    with mlflow_server(tmp_path, MLFLOW_PORT) as address:
        check_mlflow(tmp_path, address, address)
    assert not (tmp_path / "mlruns").exists()


def check_mlflow(folder: Path, tracking_uri: str | None, found_at: str) -> None:
    """A session is one MLflow run, with all its parameters, metrics, tags and pages."""
    from mlflow.tracking import MlflowClient

    (folder / "trial").mkdir()
    assert session("mlflow", folder / "trial", {"tracking_uri": tracking_uri, "experiment": "pentad"}) == []
    client = MlflowClient(found_at)
    (run,) = client.search_runs([client.get_experiment_by_name("pentad").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    losses = sorted((each.step, each.timestamp, each.value) for each in history)
    expected = [(0, 9), (1, 6), (1, 8), (2, 3), (2, 5), (3, 2)]
    assert losses == [(step, 10**12 + 1000 * step, loss) for step, loss in expected]
    assert run.data.params["run.steps"] == "4"
    assert run.data.tags["checkpoint"] == "checkpoints/step-00000002"
    assert run.info.status == "FINISHED" and run.info.run_name == "trial"
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["timeline.html"]
    page = client.download_artifacts(run.info.run_id, "timeline.html", str(folder))
    assert Path(page).read_bytes() == (ROOT / "README.md").read_bytes()


def test_mlflow_without_a_server_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("mlflow.exceptions")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    settings = {"tracking_uri": NOT_LISTENING, "experiment": "pentad"}
    with pytest.raises(exceptions.MlflowException, match="Max retries exceeded"):
        serve("mlflow", messages(tmp_path, 0, settings), print)
