"""`pentad sweep`: what it prints about trials that end in every way, and its exit status."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from commands import Pentad

from pentad.orchestrator.api import training
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.sweep import running, trial_process
from pentad.orchestrator.sweep.free_devices import FreeDevices, find_free_devices
from pentad.orchestrator.sweep.grid import Point
from pentad.orchestrator.sweep.running import RunningTrial
from pentad.orchestrator.sweep.sweep import LOGS, RUNS
from pentad.orchestrator.sweep.trials import SweepRequest, plan_trial
from pentad.schedules.ir.errors import PentadError

TINY = ("model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=128", "cluster.device=cpu")
RATES = "optimizer.learning_rate=0.1,0.2,0.3,0.4,0.5"
TRIAL = """
import json, os, re, sys
from pathlib import Path
file = Path(sys.argv[1])
rate = re.search(r"\\blearning_rate: ([.0-9]+)", file.read_text())[1]
if rate == "0.3":
    sys.exit("no room")
if rate == "0.4":
    os.kill(os.getpid(), 9)
folder = file.parents[1] / "runs" / file.stem
folder.mkdir(parents=True)
seconds = [] if rate == "0.5" else [60.0, 1.0, 2.0, 9.0] if rate == "0.1" else [60.0, 0.5]
rows = [{"step_seconds": each, "tokens_per_second": 100 / each, "mfu": None} for each in seconds]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
print("{}")
"""


@pytest.fixture
def trial_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the module that trials' processes run, which tests write."""
    monkeypatch.setattr(running, "PROCESS", "stub_trial")
    monkeypatch.setattr(running, "HEAD_SECONDS", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("pentad.orchestrator.sweep.sweep.POLL_SECONDS", 0.02)
    return tmp_path / "stub_trial.py"


def test_a_sweep_ranks_what_it_measured_and_says_why_the_rest_has_no_figures(
    pentad: Pentad, trial_module: Path
) -> None:
    trial_module.write_text(TRIAL)
    command = ("sweep", *TINY, RATES, "mesh.pp=1,8", "--out", "here")
    status, out, err = pentad(*command, "--json")
    found = json.loads(out)
    assert (status, found["ran"], len(found["trials"])) == (0, 5, 10), [row["cause"] for row in found["trials"]]
    by_rate = {row["settings"].partition(" ")[0].rpartition("=")[2]: row for row in found["trials"] if row["pp"] == 1}
    assert [by_rate[rate]["step_seconds"] for rate in ("0.1", "0.2")] == [2.0, 0.5], "medians of all but the first"
    causes = ["its process ended with status 1: no room", "its process was killed (SIGKILL)", "it ended without a step"]
    assert [by_rate[rate]["cause"] for rate in ("0.3", "0.4", "0.5")] == causes
    assert all(f": failed: {cause}" in err for cause in causes) and "2 s a step, predicted" in err
    status, out, err = pentad(*command)
    assert status == 0 and "trials ran" in out and " 0 trials ran, 10 known or pruned: here/sweep.html" in out
    lines = out.splitlines()
    head, first, second = lines[:3]
    assert head.split()[0] == "layout" and "MFU" not in head, "a column that nothing is known of is left out"
    assert ["500 ms" in first, "2 s" in second] == [True, True]
    assert all(f": failed: {cause}" in out for cause in causes)
    assert out.count("expected at least one for each of 8 pipeline stages") == 5
    assert f" the fastest: {by_rate['0.2']['command']}" in lines


def test_a_sweep_without_a_trial_that_ends_well_is_a_failure(pentad: Pentad, trial_module: Path) -> None:
    trial_module.write_text("raise SystemExit(3)")
    status, out, _ = pentad("sweep", *TINY, "mesh.pp=1")
    assert status == 1 and "failed: its process ended with status 3: it said nothing" in out
    assert pentad("sweep", *TINY, "--gpus", "4")[2].startswith("pentad: --gpus is 4: expected it with --search")


STEPS = "".join(json.dumps({"step": step, "generation": 1}) + "\n" for step in range(2))


@pytest.mark.parametrize(
    ("files", "standing"),
    [
        ({"journal.jsonl": ""}, "its ranks were still starting"),
        ({"journal.jsonl": "", "metrics.jsonl": STEPS}, "it ended after 2 steps, but not its process"),
        ({"control.json": "{", "metrics.jsonl": "{}]"}, "its driver did not answer, after 0 steps"),
    ],
)
def test_a_trial_that_is_over_its_deadline_says_how_far_it_came(
    tmp_path: Path, trial_module: Path, files: dict[str, str], standing: str
) -> None:
    trial_module.write_text("import time; time.sleep(600)")
    (tmp_path / LOGS).mkdir()
    free = FreeDevices("cpu", ["0"], 1)
    trial = plan_trial(SweepRequest(None, [], 4), Point((*TINY, "mesh.pp=1"), ()), free, tmp_path / RUNS)
    late = RunningTrial(trial, free, ("0",), 0.0, tmp_path / LOGS)
    late.folder.mkdir(parents=True)
    for name, text in {"config.yaml": dump(load(None, [])), **files}.items():
        (late.folder / name).write_text(text)
    row = late.poll()
    assert row is not None and row.outcome == "deadline" and row.cause.endswith(f": {standing}")
    assert late.process.poll() is not None


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (None, {}),
        (WorkerError("rank 1 hangs\nat 1F0", 1, "", fault="hang"), {"error": "rank 1 hangs", "fault": "hang"}),
        (PentadError("no room"), {"error": "no room", "fault": ""}),
    ],
)
def test_the_process_of_a_trial_answers_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception | None,
    answer: dict[str, str],
) -> None:
    (tmp_path / "trial.yaml").write_text(dump(load(None, ["run.steps=7"])))
    parents, steps = list[int](), list[int]()

    def train(config: object, console: object) -> None:
        steps.append(config.run.steps)  # type: ignore[attr-defined]
        if error:
            raise error

    monkeypatch.setattr(trial_process, "end_with", parents.append)
    monkeypatch.setattr(training, "run_displayed", train)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "trial.yaml"), "42"])
    assert trial_process.main() == (error is not None)
    assert json.loads(capsys.readouterr().out) == answer
    assert (parents, steps) == ([42], [7])


def test_on_a_cluster_trials_share_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices get no names, since Ray chooses among those of the cluster's kind."""
    resources = {"CPU": 8.0, "GPU": 3.0}
    monkeypatch.setattr(ray, "available_resources", lambda: resources)
    for device, count in (("cuda", 3), ("cpu", 8)):
        monkeypatch.setattr(clusters, "join", lambda *_, device=device: nullcontext(SimpleNamespace(device=device)))
        section = load(None, ["cluster.address=10.0.0.1:6379"]).cluster
        free = find_free_devices(section)
        assert (free.device, free.most, len(free.devices)) == (device, count, count)
        assert not free.variables(tuple(free.devices[:1]))
        resources.pop({"cuda": "GPU", "cpu": "CPU"}[device])
        with pytest.raises(PentadError, match=r"10.0.0.1:6379: expected a Ray cluster with a free [CG]PU"):
            find_free_devices(section)
