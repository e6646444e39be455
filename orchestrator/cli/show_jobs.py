"""`pentad submit`, `jobs`, `logs` and `stop`: each returns its exit status."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.jobs.job_log import Outcome, follow, outcome
from pentad.orchestrator.jobs.jobs import Job, Jobs
from pentad.orchestrator.planning.fit import assumed_plan
from pentad.schedules.ir.errors import PentadError


def show_submit(config: RunConfig, address: str | None, name: str | None, *, followed: bool, as_json: bool) -> int:
    """Submits a run; `followed` prints its log and returns its outcome as exit status."""
    assumed_plan(config)  # reports mistakes here, not in the job's log
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
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    heads = ("job", "run", "status", "mesh", "started", "folder")
    for head in heads:
        table.add_column(head, no_wrap=head != "folder", overflow="fold")
    rows = [(job.job, job.run, job.status, job.mesh, _clock(job), job.folder) for job in found]
    for row in rows:
        table.add_row(*map(Text, row))
    # Only folders wrap, and only on a terminal: IDs are copied, and programs read lines.
    widths = [2 + max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    console.width = max(console.width, sum(widths[:5]) + (20 if console.is_terminal else widths[5]))
    console.print(table)
    return 0


def show_logs(jobs: Jobs, job: Job, *, followed: bool, as_json: bool) -> int:
    """Prints the log of a job; `followed` continues until it ends and returns its outcome as exit status."""
    if followed:
        return _follow(jobs, job, as_json=as_json)
    log = jobs.log(job.job)
    print(json.dumps({**_facts(jobs, job), "log": log}) if as_json else log, end="\n" if as_json else "")
    return 0


def show_stop(jobs: Jobs, job: Job, *, as_json: bool) -> int:
    """Stops a job and prints how it ended; the exit status is 0 if nothing is lost."""
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


def _clock(job: Job) -> str:
    return f"{datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M}" if job.started else "-"
