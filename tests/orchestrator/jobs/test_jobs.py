"""Submitted runs: what is uploaded, how a job's outcome is reported, and that stopping and resubmitting loses
nothing."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Pentad
from paths import ROOT
from shared_cluster import shared_cluster
from submitted_runs import SMALL, STEPS, steps

from pentad.orchestrator.cli import show_jobs
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.jobs import job_log, job_package, jobs
from pentad.orchestrator.jobs.job_log import follow, outcome
from pentad.orchestrator.jobs.jobs import Job, Jobs, failure
from pentad.orchestrator.monitoring.ray_job import announce
from pentad.schedules.ir.errors import PentadError

JOB = Job("trial-1", "trial", "RUNNING", "pp2", "1f1b", "/runs/trial", 1e9, None, "", 120.0, {})
OWN = """
from pentad.schedules.generators.custom import BW, F

def mine(rank, ranks, microbatches):
    for mb in range(microbatches):
        yield F(rank, mb)
    for mb in range(microbatches):
        yield BW(rank, mb)
"""


def tree(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_package_is_copied_completely_and_preferred_to_an_installed_one(tmp_path: Path) -> None:
    package = job_package.write_package(tmp_path / "one")
    folders = {f"{name}/{file}" for name in job_package.FOLDERS for file in tree(ROOT / name)}
    assert tree(package) == folders | tree(ROOT / "orchestrator" / "namespace")
    assert not list(package.rglob("__pycache__"))
    # The copy can be copied again: an installed package is treated like a checkout.
    code = """
import sys
from pathlib import Path
from pentad.orchestrator.cli import cli
from pentad.orchestrator.jobs import job_package
print(cli.__file__, job_package.write_package(Path(sys.argv[1])))
"""
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "two")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "one")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(package / "orchestrator" / "cli" / "cli.py"), str(tmp_path / "two" / "pentad")]
    assert tree(tmp_path / "two" / "pentad") == tree(package)


def test_a_job_joins_its_own_cluster_and_its_folders_are_absolute() -> None:
    given = load(None, ["run.folder=out/runs", "data.path=../corpus", "data.cache=~/cache", "cluster.address=h:1"])
    config = job_package.for_cluster(given, Path("/home/me/here"))
    assert config.run.folder == "/home/me/here/out/runs"
    assert config.data.path == "/home/me/corpus"
    assert config.data.cache == str(Path.home() / "cache")
    assert (config.cluster.address, config.cluster.auth) == ("auto", "token")
    assert job_package.for_cluster(config, Path("/elsewhere")) == config
    assert job_package.for_cluster(load(None, []), Path("/")).data.path == "builtin:pydoc"
    assert job_package.for_cluster(given, Path("/"), is_open=True).cluster.auth == "disabled"


def test_a_custom_schedule_is_sent_with_its_job(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "my.py"
    file.parent.mkdir()
    file.write_text(OWN)
    environment = job_package.runtime_environment(load(None, [f"schedule.name={file}:mine"]), tmp_path)
    work = Path(environment["working_dir"])
    assert (work / "my.py").read_text() == OWN
    written = (work / job_package.CONFIG).read_text()
    assert "my.py:mine" in written
    assert str(tmp_path) not in written


def test_a_job_has_metadata_and_time_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/x", "SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    config = job_package.for_cluster(load(None, ["run.name=trial", "cluster.stop_timeout_seconds=7.5"]), Path("/a"))
    facts = job_package.metadata(config)
    assert facts.keys() == {"job_name", *(f"pentad/{name}" for name in jobs._FACTS)}
    assert facts["job_name"] == "trial"  # the dashboard's name for it
    assert (facts["pentad/run"], facts["pentad/folder"]) == ("trial", "/a/runs/trial")
    assert (facts["pentad/mesh"], facts["pentad/schedule"]) == ("pp4", "zb-h2")
    assert RunConfig.model_validate(json.loads(facts["pentad/config"])) == config
    environment = job_package.runtime_environment(config, tmp_path)
    assert load(Path(environment["working_dir"]) / job_package.CONFIG, []) == config
    variables = environment["env_vars"]
    assert (variables["RAY_JOB_STOP_WAIT_TIME_S"], variables["OMP_NUM_THREADS"]) == ("8", "3")
    assert not {"PYTHONPATH", "SECRET"} & set(variables)


ENTRY = (
    "Job entrypoint command failed with exit code {}, last available logs (truncated to 20,000 chars):\nRunning\n{}\n"
)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (ENTRY.format(1, " Ray dashboard\npentad: mesh pp4 has 4 ranks"), "mesh pp4 has 4 ranks"),
        (ENTRY.format(1, "Traceback\nValueError: x"), "ValueError: x"),
        (
            ENTRY.format(1, "ModuleNotFoundError: No module named 'torch'"),
            "No module named 'torch': expected what pentad",
        ),
        (ENTRY.format(2, "unknown option -P\nTry `python -h'"), "Try `python -h'"),
        (ENTRY.format(127, "sh: 1: exec: python: not found"), "has no `python`: expected one"),
        (ENTRY.format(-9, "step 3"), "its driver was killed by signal 9"),
        ("runtime_env setup failed: x\nOSError: no room", "OSError: no room"),
        ("", "no reason given"),
    ],
)
def test_a_failure_is_reported_in_one_sentence(message: str, sentence: str) -> None:
    assert sentence in failure(message)
    assert "\n" not in failure(message)


@pytest.mark.parametrize(
    ("status", "log", "ok", "words"),
    [
        ("SUCCEEDED", "step 5\n\n finished  6 steps\n loss 5\n", True, "finished; the run is in /runs/trial"),
        ("STOPPED", "\n stopped   4 steps\n", True, "was stopped after 4 steps, with a checkpoint in /runs/trial"),
        ("STOPPED", "\n finished  6 steps\n", True, "finished"),
        ("STOPPED", "pentad: interrupted\n", True, "was stopped before it started training"),
        ("STOPPED", "step 1\nstep 2\n", False, "was killed: .* within cluster.stop_timeout_seconds = 120"),
        ("FAILED", "\n stopped   4 steps\n", False, "failed: of this"),
    ],
)
def test_the_outcome_of_a_job_is_the_exit_status(status: str, log: str, ok: bool, words: str) -> None:
    ended = outcome(JOB._replace(status=status, message="of this"), log)
    assert ended.ok is ok
    assert re.match(f"job trial-1 {words}", ended.sentence)


def fake(tails: list[list[str | Exception]], answers: list[Job | Exception]) -> Any:
    """Jobs whose log streams yield or raise the items of `tails`, and whose infos are `answers`, one per request."""

    async def tail(job: str) -> AsyncIterator[str]:
        for text in tails.pop(0):
            await asyncio.sleep(0)
            if isinstance(text, Exception):
                raise text
            yield text

    def get(job: str) -> Job:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(client=SimpleNamespace(tail_job_logs=tail), get=get, address="http://head:8265")


@pytest.fixture
def no_polling_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(job_log.asyncio, "sleep", lambda seconds: sleep(0))


@pytest.mark.usefixtures("no_polling_delay")
def test_following_resumes_after_a_broken_connection() -> None:
    tails: list[list[str | Exception]] = [
        ["one\ntw"],
        [RuntimeError("broken")],
        ["one\n", "two\nthree\n"],
        ["one\ntwo\n"],
    ]
    ended = JOB._replace(status="SUCCEEDED")
    seen: list[str] = []
    found, result = follow(fake(tails, [JOB, PentadError("silent"), ended]), "trial-1", seen.append)
    assert "".join(seen) == "one\ntwo\nthree\n"
    assert (found, result.ok) == (ended, True)


@pytest.mark.usefixtures("no_polling_delay")
def test_following_ends_when_the_cluster_stops_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "TIMEOUT_SECONDS", 0.0)
    with pytest.raises(PentadError, match="silent"):
        follow(fake([["one\n"]], [PentadError("silent")]), "trial-1", lambda text: None)


def test_ctrl_c_detaches_and_says_how_to_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show_jobs, "follow", interrupted)
    at = "--address http://head:8265"
    hints = f"pentad logs trial-1 {at} --follow, stop it with pentad stop trial-1 {at}"
    with pytest.raises(PentadError, match=f"^detached from job trial-1, which continues: follow it with {hints}$"):
        show_jobs._follow(fake([], []), JOB, as_json=False)


def test_only_a_driver_in_a_job_announces_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert announce({"control": "127.0.0.1:1"}) is False
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert announce({"control": "127.0.0.1:1"}) is False


@pytest.fixture(scope="module")
def cluster() -> clusters.Cluster:
    return shared_cluster()


def wait_for(path: Path) -> None:
    """Waits for a file with content, until the test times out."""
    while not (path.exists() and path.stat().st_size):
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_submitted_run_trains_and_its_log_is_followed(short: tuple[int, str, str], runs: Path) -> None:
    status, out, err = short
    assert (status, err) == (0, ""), out
    assert f"folder  {runs}/short, on the cluster's" in out
    assert "step 19  loss" in out
    assert out.endswith(f"pentad: job short finished; the run is in {runs}/short\n")
    assert len(steps(runs / "short")) == 20


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("uninterrupted")
@pytest.mark.slow
def test_a_stopped_run_resumes_when_submitted_again(
    cluster: clusters.Cluster, pentad: Pentad, runs: Path, corpus: str
) -> None:
    at = ("--address", str(cluster.dashboard))
    same = (*SMALL, f"data.path={corpus}", f"run.folder={runs}", "run.name=parts", *at)
    status, out, _ = pentad("submit", *same, "--name", "first", "--no-follow", "--json")
    assert status == 0
    assert json.loads(out)["status"] in ("PENDING", "RUNNING")
    assert "run.name is parts, which job first is running already" in pentad("submit", *same)[2]
    wait_for(runs / "parts" / "metrics.jsonl")
    status, out, err = pentad("stop", "first", *at)
    assert (status, err) == (0, "")
    assert re.search(rf"job first was stopped after \d+ steps, with a checkpoint in {runs}/parts", out)
    done = len(steps(runs / "parts"))
    assert 0 < done < STEPS
    assert list((runs / "parts" / "checkpoints").iterdir())
    assert "--name is 'first', which is already the ID of a job there" in pentad("submit", *same, "--name", "first")[2]

    status, out, _ = pentad("submit", *same, "--json")
    ended = json.loads(out)
    assert (status, ended["status"], ended["run"]) == (0, "SUCCEEDED", "parts")
    assert f"resuming from step {done}" in pentad("logs", ended["job"], *at)[1]
    assert steps(runs / "parts") == steps(runs / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_jobs_are_listed_with_the_endpoints_of_their_drivers(
    cluster: clusters.Cluster, pentad: Pentad, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--address", str(cluster.dashboard))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "short"}}))
    assert announce({"control": "10.0.0.1:1234", "metrics": "10.0.0.1:5678"})
    listed = {job["job"]: job for job in json.loads(pentad("jobs", *at, "--json")[1])["jobs"]}
    announced = {"control": "10.0.0.1:1234", "metrics": "10.0.0.1:5678", "dashboard": cluster.dashboard}
    page = listed["short"]["endpoints"].pop("page")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", page), "announced when the run began"
    assert listed["short"]["endpoints"] == announced
    assert (listed["short"]["status"], listed["short"]["folder"]) == ("SUCCEEDED", f"{runs}/short")
    out = pentad("jobs", *at)[1]
    assert out.count("\n") == 1 + len(listed)
    assert re.search(rf" short +short +SUCCEEDED +pp2 +\d{{4}}-\d\d-\d\d \d\d:\d\d +{runs}/short", out)
    ended = "a job that has already ended (SUCCEEDED): expected a live one"
    assert pentad("stop", "short", *at)[2] == f"pentad: ID is 'short', {ended}\n"


@pytest.mark.slow
@pytest.mark.parametrize("job", ["nobody", "../version", ""])
def test_an_unknown_job_is_reported_in_one_sentence(cluster: clusters.Cluster, pentad: Pentad, job: str) -> None:
    for verb in ("logs", "stop"):
        status, out, err = pentad(verb, job, "--address", str(cluster.dashboard))
        assert (status, out) == (1, "")
        assert err.startswith(
            f"pentad: ID is '{job}', which is not a job that pentad submitted to {cluster.dashboard}: "
        )


@pytest.mark.slow
def test_a_job_name_with_other_characters_is_refused(cluster: clusters.Cluster, pentad: Pentad) -> None:
    err = pentad("submit", "--name", "a/b", "--address", str(cluster.dashboard))[2]
    assert err == "pentad: --name is 'a/b': expected letters, digits, '_', '-' and '.', not starting with '-' or '.'\n"


@pytest.mark.slow
def test_a_driver_error_reaches_the_user(cluster: clusters.Cluster, pentad: Pentad, runs: Path) -> None:
    wide = (
        "mesh.dp=4",
        "batch.global_batch_size=8",
        "cluster.start_timeout_seconds=1",
        f"run.folder={runs}",
        "run.name=wide",
    )
    status, out, err = pentad("submit", *SMALL, *wide, "--address", str(cluster.dashboard))
    assert status == 1
    assert re.fullmatch(r"pentad: job wide-\w+ failed: mesh dp4 x pp2 has 8 ranks and needs 8 CPUs, but .*\n", err)
    assert out.count("\npentad: mesh dp4 x pp2 has 8 ranks") == 1


@pytest.mark.slow
def test_a_wrong_token_is_refused_by_a_real_cluster(
    cluster: clusters.Cluster, pentad: Pentad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    assert "refuses the token found here" in pentad("jobs", "--address", str(cluster.dashboard))[2]
    with pytest.raises(PentadError, match="refuses the token found here"):
        Jobs(cluster.dashboard)
