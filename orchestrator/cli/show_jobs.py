"""`pentad submit`, `jobs`, `logs` and `stop`: each returns its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from pentad.orchestrator.cli.show_lists import clock, print_table
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.jobs.job_log import Outcome, follow, outcome
from pentad.orchestrator.jobs.jobs import Job, Jobs
from pentad.orchestrator.memory.choice import with_choices
from pentad.orchestrator.planning.fit import device_of
from pentad.orchestrator.planning.planning import assumed_plan
from pentad.schedules.ir.errors import PentadError


def show_submit(config: RunConfig, address: str | None, name: str | None, *, followed: bool, as_json: bool) -> int:
    """Submits a run; if `followed`, prints its log and returns its outcome as exit status."""
    assumed_plan(with_choices(config, *device_of(config)))  # reports mistakes here, not in the job's log
    jobs = Jobs(address)
    job = jobs.submit(config, name, Path.cwd())
    log = sys.stderr if as_json else sys.stdout
    print(f"job {job.job} submitted to {jobs.address}", file=log)
    print(f" folder  {job.folder}, on the cluster's head node or storage that its nodes share", file=log)
    if followed:
        return _follow(jobs, job, as_json=as_json)
    if as_json:
        print(json.dumps(_facts(jobs, job)))
    else:
        print(f" follow  {_command('logs', jobs, job)} --follow")
        print(f" stop    {_command('stop', jobs, job)}")
    return 0


def show_jobs(address: str | None, console: Console, *, as_json: bool) -> int:
    """Lists the runs that were submitted to a cluster, the newest first."""
    jobs = Jobs(address)
    found = jobs.all()
    if as_json:
        print(json.dumps({"address": jobs.address, "jobs": [job._asdict() for job in found]}))
        return 0
    if not found:
        print(f"no run was submitted to {jobs.address}")
        return 0
    heads = ("job", "run", "status", "mesh", "started", "folder")
    rows = [
        (job.job, job.run, job.status, job.mesh, clock(job.started) if job.started else "-", job.folder)
        for job in found
    ]
    print_table(console, heads, rows, wrapped="folder")
    return 0


def show_logs(jobs: Jobs, job: Job, *, followed: bool, as_json: bool) -> int:
    """Prints the log of a job; if `followed`, until the job ends, and returns its outcome as exit status."""
    if followed:
        return _follow(jobs, job, as_json=as_json)
    log = jobs.log(job.job)
    print(json.dumps({**_facts(jobs, job), "log": log}) if as_json else log, end="\n" if as_json else "")
    return 0


def show_stop(jobs: Jobs, job: Job, *, as_json: bool) -> int:
    """Stops a job and prints how it ended; returns 0 if nothing was lost."""
    job = jobs.stop(job.job)
    return _end(jobs, job, outcome(job, jobs.log(job.job)), as_json=as_json)


def _follow(jobs: Jobs, job: Job, *, as_json: bool) -> int:
    log = sys.stderr if as_json else sys.stdout
    try:
        found, ended = follow(jobs, job.job, lambda text: print(text, end="", file=log, flush=True))
    except KeyboardInterrupt:
        commands = f"follow it with {_command('logs', jobs, job)} --follow, stop it with {_command('stop', jobs, job)}"
        raise PentadError(f"detached from job {job.job}, which continues: {commands}") from None
    return _end(jobs, found, ended, as_json=as_json)


def _end(jobs: Jobs, job: Job, ended: Outcome, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({**_facts(jobs, job), "outcome": ended.sentence}))
    elif ended.ok:
        print(f"pentad: {ended.sentence}")
    if not ended.ok:
        print(f"pentad: {ended.sentence}", file=sys.stderr)
    return 0 if ended.ok else 1


def _command(verb: str, jobs: Jobs, job: Job) -> str:
    return f"pentad {verb} {job.job} --address {jobs.address}"


def _facts(jobs: Jobs, job: Job) -> dict[str, Any]:
    return {"address": jobs.address, **job._asdict()}
