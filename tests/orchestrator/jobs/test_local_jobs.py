"""`pentad submit`, `jobs`, `logs` and `stop` with a fake cluster that only records requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from commands import Pentad
from ray.exceptions import AuthenticationError
from submitted_runs import SMALL

from pentad.orchestrator.jobs import job_package, jobs
from pentad.orchestrator.monitoring.ray_job import announce

AT = ("--address", "http://head:8265")
STOPPED = "step 3\n\n stopped   4 steps\n"


class Cluster:
    """Ray's client of a cluster whose jobs run until they are stopped, which takes `polls` queries."""

    def __init__(self) -> None:
        self.jobs = {"others": SimpleNamespace(submission_id="others", metadata={}, status="RUNNING")}
        self.logs, self.polls = "step 3\n", 2
        self.error: Exception | None = None
        self.stopping, self.sent = dict[str, int](), ""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: Any, metadata: Any) -> None:
        self.sent = (Path(runtime_env["working_dir"]) / job_package.CONFIG).read_text()
        self.jobs[submission_id] = SimpleNamespace(
            **{"submission_id": submission_id, "metadata": metadata, "status": "RUNNING", "message": "runs"},
            **{"start_time": 1e12 + len(self.jobs), "end_time": None},
        )

    def list_jobs(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return list(self.jobs.values())

    def get_job_info(self, job: str) -> Any:
        if self.error is not None:
            raise self.error
        if job not in self.jobs:
            raise RuntimeError(f"Job {job} does not exist")
        if job in self.stopping:
            self.stopping[job] -= 1
            if not self.stopping[job]:
                self.jobs[job].status, self.logs = "STOPPED", STOPPED
        return self.jobs[job]

    def get_job_logs(self, job: str) -> str:
        return self.logs

    def stop_job(self, job: str) -> None:
        self.stopping[job] = self.polls

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        self.jobs[job].status, self.logs = "SUCCEEDED", "step 5\n finished  6 steps\n"
        yield self.logs


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made, now = Cluster(), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(job_package, "write_package", lambda out: out / "pentad")
    monkeypatch.setattr(jobs, "is_open", lambda address: False)
    monkeypatch.setattr(jobs, "user_token", lambda: "secret")
    monkeypatch.setattr(jobs, "connect", lambda address, token: made)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return made


def test_a_run_is_submitted_once_listed_and_stopped(pentad: Pentad, cluster: Cluster) -> None:
    assert pentad("jobs", *AT)[1] == "no run was submitted to http://head:8265\n"
    submit = ("submit", *SMALL, *AT)
    status, out, err = pentad(*submit, "run.name=mine", "--name", "first", "--no-follow")
    assert (status, err) == (0, "") and out.startswith("job first submitted to http://head:8265\n folder  ")
    assert " stop    pentad stop first --address http://head:8265" in out
    assert "name: mine" in cluster.sent
    again = "run.name is mine, which job first is running already (RUNNING): expected another, or that you stop it"
    assert again in pentad(*submit, "run.name=mine")[2]
    assert "--name is 'first', which is already the ID of a job" in pentad(*submit, "run.name=b", "--name", "first")[2]
    assert "--name is 'a/b': expected letters" in pentad(*submit, "--name", "a/b")[2]
    second = json.loads(pentad(*submit, "run.name=other", "--no-follow", "--json")[1])
    assert second["run"] == "other" and second["job"].startswith("other-") and second["status"] == "RUNNING"
    listed = json.loads(pentad("jobs", *AT, "--json")[1])["jobs"]
    assert [job["run"] for job in listed] == ["other", "mine"], "the newest first, and nobody else's"
    out = pentad("jobs", *AT)[1]
    assert out.split()[:3] == ["job", "run", "status"] and out.index("other-") < out.index(" first ")
    status, out, err = pentad("stop", "first", *AT)
    assert (status, err) == (0, "")
    assert out.startswith("pentad: job first was stopped after 4 steps, with a checkpoint in ")
    ended = "pentad: ID is 'first', a job that has already ended (STOPPED): expected a live one\n"
    assert pentad("stop", "first", *AT) == (1, "", ended)


def test_a_job_that_does_not_stop_is_a_failure(pentad: Pentad, cluster: Cluster) -> None:
    cluster.polls = 10**6
    pentad("submit", *SMALL, *AT, "--name", "first", "--no-follow", "cluster.stop_timeout_seconds=7")
    status, _, err = pentad("stop", "first", *AT)
    assert status == 1 and "job first was asked to stop but is still RUNNING: expected it to end by now" in err
    cluster.polls, cluster.stopping = 1, {}
    cluster.get_job_logs = lambda job: "step 3\n"  # type: ignore[method-assign]
    status, out, err = pentad("stop", "first", *AT, "--json")
    assert status == 1 and "was killed: it did not exit within cluster.stop_timeout_seconds = 7" in err
    assert json.loads(out)["outcome"] in err


def test_the_log_of_a_job_is_printed_or_followed_to_its_end(pentad: Pentad, cluster: Cluster) -> None:
    pentad("submit", *SMALL, *AT, "--name", "first", "--no-follow")
    assert pentad("logs", "first", *AT) == (0, "step 3\n", "")
    assert json.loads(pentad("logs", "first", *AT, "--json")[1])["log"] == "step 3\n"
    status, out, _ = pentad("logs", "first", *AT, "--follow")
    assert status == 0 and out.startswith("step 5\n finished  6 steps\npentad: job first finished; the run is in ")
    status, out, err = pentad("submit", *SMALL, *AT, "--name", "next", "run.name=next", "--json")
    assert status == 0 and json.loads(out)["status"] == "SUCCEEDED" and "step 5\n" in err


def test_a_job_that_pentad_did_not_submit_is_unknown(pentad: Pentad, cluster: Cluster) -> None:
    for job in ("nobody", "../version", "others"):
        sentence = f"ID is '{job}', which is not a job that pentad submitted to http://head:8265: expected"
        assert f"{sentence} one that `pentad jobs` lists (none is live)" in pentad("logs", job, *AT)[2]
    pentad("submit", *SMALL, *AT, "--name", "first", "--no-follow")
    assert f"{sentence} a live one (first)" in pentad("stop", job, *AT)[2]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (AuthenticationError("check failed"), "the Ray cluster at http://head:8265 refuses the token found"),
        (ConnectionError("closed"), "the Ray cluster at http://head:8265 does not answer any more: closed"),
        (RuntimeError("a\nRequest failed: 500\n"), "the Ray cluster at http://head:8265 refuses: Request failed: 500"),
    ],
)
def test_what_the_cluster_refuses_is_one_sentence(
    pentad: Pentad, cluster: Cluster, error: Exception, sentence: str
) -> None:
    cluster.error = error
    for command in (("jobs",), ("logs", "first")):
        status, out, err = pentad(*command, *AT)
        assert (status, out, err.count("\n")) == (1, "", 1) and sentence in err


def test_a_driver_in_a_job_adds_its_endpoints_to_the_jobs_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"status": "RUNNING", "metadata": {"pentad/run": "mine"}}
    stored = dict[bytes, bytes]()

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float) -> None:
        assert overwrite
        stored[key] = value

    client = SimpleNamespace(internal_kv_get=lambda key, *_, **__: stored[key], internal_kv_put=put)
    monkeypatch.setattr(ray._private.worker, "global_worker", SimpleNamespace(gcs_client=client))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "first"}}))
    assert not announce({"page": "http://a:1/"}), "Ray knows no such job"
    from ray.dashboard.modules.job.common import JobInfoStorageClient

    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id="first").encode()
    stored[key] = json.dumps(facts).encode()
    assert announce({"page": "http://a:1/"})
    assert json.loads(stored[key]) == facts | {"metadata": {"pentad/run": "mine", "pentad/page": "http://a:1/"}}
