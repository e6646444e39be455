"""Runs as Ray jobs: submitted, listed and stopped through the cluster's dashboard, without joining the cluster."""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.jobs.client_auth import connect, dashboard_url, is_open, refusal, user_token
from pentad.orchestrator.jobs.job_package import ENTRYPOINT, for_cluster, metadata, runtime_environment
from pentad.schedules.ir.errors import PentadError

LIVE = ("PENDING", "RUNNING")
_FACTS = ("version", "run", "mesh", "schedule", "folder", "config")  # metadata other than endpoints
_NEEDS = "expected what pentad needs, in the `python` on the PATH that the cluster's Ray was started with"
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Job(NamedTuple):
    """A submitted run: its `status` in Ray and a sentence about it, `message`; times are in Unix seconds.

    `stop_seconds` is how long it may take to stop; `endpoints` are those that its driver announced.
    """

    job: str
    run: str
    status: str
    mesh: str
    schedule: str
    folder: str
    started: float | None
    ended: float | None
    message: str
    stop_seconds: float
    endpoints: dict[str, str]

    @property
    def is_live(self) -> bool:
        return self.status in LIVE


class Jobs:
    """The jobs of the cluster whose dashboard is at `address`."""

    def __init__(self, address: str | None) -> None:
        """Connects to the cluster. Raises PentadError if no Ray cluster answers there within seconds, or the token is
        wrong."""
        self.address = dashboard_url(address)
        self.is_open = is_open(self.address)
        with self._errors_reported():
            self.client = connect(self.address, "" if self.is_open else user_token())

    def submit(self, config: RunConfig, name: str | None, here: Path) -> Job:
        """Submits `config` as the job `name` (None: the run's name and a suffix); `here` is the working directory.

        Raises PentadError if a live job has the same run, or any job has the same name.
        """
        if name is not None and not _ID.fullmatch(name):
            expected = "letters, digits, '_', '-' and '.', not starting with '-' or '.'"
            raise PentadError(f"--name is '{name}': expected {expected}")
        config = for_cluster(config, here, is_open=self.is_open)
        for other in self.all():
            if other.is_live and other.run == config.run.name:
                raise PentadError(
                    f"run.name is {other.run}, which job {other.job} is running already ({other.status}): expected "
                    f"another, or that you stop it (pentad stop {other.job} --address {self.address})"
                )
            if other.job == name:
                raise PentadError(f"--name is '{name}', which is already the ID of a job there: expected a new one")
        job = name or f"{config.run.name}-{secrets.token_hex(3)}"
        with tempfile.TemporaryDirectory(prefix="pentad-job-") as out, self._errors_reported():
            self.client.submit_job(
                entrypoint=ENTRYPOINT,
                submission_id=job,
                runtime_env=runtime_environment(config, Path(out)),
                metadata=metadata(config),
            )
        return self.get(job)

    def all(self) -> list[Job]:
        """The jobs that pentad submitted, the newest first."""
        with self._errors_reported():
            found = [_job(details) for details in self.client.list_jobs() if _is_pentads(details)]
        return sorted(found, key=lambda job: job.started or 0.0, reverse=True)

    def get(self, job: str) -> Job:
        """The job with this ID. Raises PentadError if there is none."""
        with self._errors_reported():
            details = _details(self.client, job)
        if details is not None and _is_pentads(details):
            return _job(details)
        live = ", ".join(found.job for found in self.all() if found.is_live)
        known = f"a live one ({live})" if live else "one that `pentad jobs` lists (none is live)"
        found = f"ID is '{job}', which is not a job that pentad submitted to {self.address}"
        raise PentadError(f"{found}: expected {known}")

    def log(self, job: str) -> str:
        """Everything that the job has printed so far."""
        with self._errors_reported():
            return self.client.get_job_logs(self.get(job).job)

    def stop(self, job: str) -> Job:
        """Asks a live job to finish its step, save a checkpoint and exit, and waits for that.

        Raises PentadError if it is not live, or still runs long after Ray should have killed it.
        """
        found = self.get(job)
        if not found.is_live:
            raise PentadError(f"ID is '{job}', a job that has already ended ({found.status}): expected a live one")
        with self._errors_reported():
            self.client.stop_job(job)
        until = time.monotonic() + found.stop_seconds + 30.0  # Ray kills and records the death with a delay
        while (found := self.get(job)).is_live:
            if time.monotonic() > until:
                raise PentadError(f"job {job} was asked to stop but is still {found.status}: expected it to end by now")
            time.sleep(0.5)
        return found

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        """Turns errors of Ray's client into PentadErrors."""
        try:
            yield
        except AuthenticationError as error:
            raise PentadError(refusal(self.address, str(error))) from error
        except OSError as error:
            root: BaseException = error
            while root.__context__ is not None:  # down to the OS error beneath those of Ray's HTTP library
                root = root.__context__
            raise PentadError(f"the Ray cluster at {self.address} does not answer any more: {root}") from error
        except (RuntimeError, ValueError) as error:
            raise PentadError(f"the Ray cluster at {self.address} refuses: {_last_line(str(error))}") from error


def failure(message: str) -> str:
    """Ray's message about a failed job in one sentence, or pentad's own error in it if there is one."""
    ours = [line.removeprefix("pentad: ") for line in message.splitlines() if line.startswith("pentad: ")]
    code = re.search(r"failed with exit code (-?\d+)", message)
    if ours:
        return ours[-1]
    if code and code[1] == "127":
        return "the PATH that the cluster's Ray was started with has no `python`: expected one"
    if code and code[1].startswith("-"):
        return f"its driver was killed by signal {code[1][1:]}"
    return _last_line(message) + (f": {_NEEDS}" if "No module named" in message else "")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" .")), "no reason given")


def _details(client: JobSubmissionClient, job: str) -> Any:
    """What Ray knows about a job; None if there is no such job."""
    if not _ID.fullmatch(job):
        return None
    try:
        return client.get_job_info(job)
    except RuntimeError as error:
        if "does not exist" in str(error):
            return None
        raise


def _is_pentads(details: Any) -> bool:
    return bool(details.submission_id and "pentad/run" in (details.metadata or {}))


def _job(details: Any) -> Job:
    ours = (pair for pair in details.metadata.items() if pair[0].startswith("pentad/"))
    said = {name.removeprefix("pentad/"): value for name, value in ours}
    return Job(
        job=details.submission_id,
        run=said["run"],
        status=str(details.status),
        mesh=said.get("mesh", ""),
        schedule=said.get("schedule", ""),
        folder=said.get("folder", ""),
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        message=failure(details.message or "") if details.status == "FAILED" else details.message or "",
        stop_seconds=json.loads(said.get("config", "{}")).get("cluster", {}).get("stop_timeout_seconds", 120.0),
        endpoints={name: value for name, value in said.items() if name not in _FACTS},
    )
