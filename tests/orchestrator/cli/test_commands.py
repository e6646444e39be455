"""Commands that list, find and stop runs, and errors reported before Ray starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import load
from pentad.orchestrator.jobs import jobs
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning import hardware
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.train import train
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError

ROW = {**dict.fromkeys(METRIC_KEYS, 0.5), "mfu": None, "generation": 1, "tokens": 8, "skipped": False}


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    """A run in runs/ that was stopped after two steps."""
    config = load(None, [f"run.folder={tmp_path / 'runs'}", "run.name=trial"])
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        folder.event("start", generation=1, step=0)
        for step in range(2):
            folder.metrics({**ROW, "step": step})
        folder.event("stop", generation=1, step=2)
    return folder.path


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(("nonsense",), "pentad"), (("plan", "--nonsense"), "pentad plan"), (("schedule", "zb-h1"), "pentad schedule")],
)
def test_a_usage_error_points_to_help(pentad: Pentad, arguments: tuple[str, ...], command: str) -> None:
    status, out, err = pentad(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("pentad: ") and err.endswith(f" (see `{command} --help`)\n")


def test_the_shell_completion_script_is_printed() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "import sys; from pentad.orchestrator.cli.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "--show-completion", "bash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "_PENTAD_COMPLETE=complete_bash" in done.stdout, done.stderr


def test_schedules_lists_the_entire_catalogue(pentad: Pentad) -> None:
    status, out, _ = pentad("schedules", "--json")
    found = {each["name"]: each for each in json.loads(out)["schedules"]}
    assert status == 0 and list(found) == list(CATALOGUE)
    assert all("arXiv" in each["paper"] for each in found.values())
    assert (found["zb-v"]["placement"], found["zb-v"]["chunks"]) == ("V", 2)
    assert found["interleaved"]["options"] == ["chunks", "group"]
    lines = pentad("schedules")[1].splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(CATALOGUE)]] == list(CATALOGUE)


def test_runs_lists_state_step_and_loss(pentad: Pentad, trial: Path) -> None:
    (trial.parent / "old").mkdir()
    (trial.parent / "old" / "config.yaml").write_text("run: {nonsense: 1}\n")
    status, out, _ = pentad("runs", "--json")
    found = {run["name"]: run for run in json.loads(out)["runs"]}
    assert status == 0 and found.keys() == {"trial", "old"}
    assert {key: found["trial"][key] for key in ("state", "step", "steps", "loss")} == {
        "state": "stopped", "step": 2, "steps": 60, "loss": 0.5,
    }  # fmt: skip
    assert found["old"]["state"] == "unreadable"
    assert any(line.split()[:3] == ["trial", "stopped", "2/60"] for line in pentad("runs")[1].splitlines())
    assert pentad("runs", "--folder", "nowhere")[2].startswith("pentad: --folder is 'nowhere', which is not a folder")


def test_logs_of_a_run_are_its_steps_and_events_in_order(pentad: Pentad, trial: Path) -> None:
    status, out, _ = pentad("logs", "trial")
    assert status == 0
    assert [line.split()[0] if "step " in line[:5] else line.split()[2] for line in out.splitlines()] == [
        "start", "step", "step", "stop",
    ]  # fmt: skip
    assert json.loads(pentad("logs", "trial", "--json")[1])["log"] == out
    assert pentad("logs", "trial", "--follow")[1] == out
    assert "run trial is stopped at step 2: expected a live one" in pentad("stop", "trial")[2]


def test_the_run_of_a_job_is_found_by_its_folder(pentad: Pentad, trial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace(job="first", status="RUNNING", folder=str(trial))
    served = SimpleNamespace(address="http://cluster", get=lambda name: job)
    monkeypatch.setattr(jobs, "Jobs", lambda address: served)
    assert json.loads(pentad("status", "first", "--address", "http://cluster", "--json")[1])["state"] == "stopped"
    job.folder = "/elsewhere/trial"
    err = pentad("pause", "first", "--address", "http://cluster")[2]
    assert "its folder /elsewhere/trial is on the cluster at http://cluster and not visible from here" in err


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        raise AssertionError("Ray must not start")

    monkeypatch.setattr("pentad.orchestrator.run.train.launch", launch)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.layers=9"],
            r"^model\.layers is 9, but the run in .*trial has 8: choose another run\.name than trial \(.*\)$",
        ),
        (["run.seed=1"], r"^run\.seed is 1, but the run in .*trial has 0: choose another run\.name than trial \(.*\)$"),
    ],
)
def test_a_run_that_cannot_resume_is_refused_before_ray_starts(
    no_ray: None, trial: Path, overrides: list[str], sentence: str
) -> None:
    config = load(None, [f"run.folder={trial.parent}", "run.name=trial", *overrides])
    with pytest.raises(PentadError, match=sentence):
        train(config)


def test_a_run_folder_of_another_version_is_refused_in_one_sentence(no_ray: None, pentad: Pentad, trial: Path) -> None:
    text = (trial / "config.yaml").read_text()
    (trial / "config.yaml").write_text(text.replace("global_batch_size", "sequences"))
    config = load(None, [f"run.folder={trial.parent}", "run.name=trial"])
    with pytest.raises(
        PentadError, match=r"^the run in .*trial cannot be resumed: .*batch\.sequences is unknown"
    ) as error:
        train(config)
    assert "\n" not in str(error.value) and "choose another run.name than trial" in str(error.value)
    status, _, err = pentad("status", "trial")
    assert status == 1 and "config.yaml is of another version of pentad (batch.sequences is unknown" in err


@pytest.mark.parametrize(("gpus", "cores", "arguments", "pp", "note"), [
    (2, 8, [], 2, "this machine has 2 GPUs: the quickstart runs with mesh.pp = 2, not 4"),
    (1, 8, [], 1, "this machine has 1 GPU: "), (8, 2, [], 4, ""), (0, 8, [], 4, ""),
    (0, 2, [], 2, "this machine has 2 CPU cores: the quickstart runs with mesh.pp = 2, not 4"),
    (0, 1, [], 2, "this machine has 1 CPU core: the quickstart runs with mesh.pp = 2, not 4"),
    (2, 8, ["mesh.dp=2"], 4, ""), (1, 2, ["cluster.device=cpu"], 4, ""),
])  # fmt: skip
def test_the_quickstart_uses_the_available_gpus_or_cores(
    pentad: Pentad, monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, arguments: list[str], pp: int, note: str
) -> None:
    configs = []

    def fake_train(config: Any, **_: Any) -> dict[str, Any]:
        configs.append(config)
        raise PentadError("enough")

    monkeypatch.setattr(hardware, "local_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "local_cores", lambda: cores)
    monkeypatch.setattr("pentad.orchestrator.run.train.train", fake_train)
    monkeypatch.setattr("pentad.orchestrator.run.train.prepare", lambda config: None)
    _, out, _ = pentad("train", *arguments)
    assert configs[0].mesh.pp == pp
    assert note in out and ("the quickstart runs with" in out) == bool(note)
