"""Follows a job's log, and derives from it how the job ended."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from pentad.orchestrator.jobs.jobs import Job, Jobs
from pentad.schedules.ir.errors import PentadError

QUIET_SECONDS = 20.0  # without output before the cluster is asked whether the job is live
TIMEOUT_SECONDS = 60.0  # for a cluster that stops answering
_TAIL = 20_000  # characters
_ENDING = re.compile(r"^ (stopped|finished) +(\d+) steps$", re.MULTILINE)  # as display.print_summary prints it


class Outcome(NamedTuple):
    """How a job ended, in one sentence; `ok` if it finished, or was stopped with a checkpoint."""

    ok: bool
    sentence: str


def follow(jobs: Jobs, job: str, write: Callable[[str], None]) -> tuple[Job, Outcome]:
    """Writes what a job prints until it ends, reconnecting whenever the connection breaks.

    Raises PentadError if the cluster is silent for TIMEOUT_SECONDS.
    """
    return asyncio.run(_follow(jobs, job, write))


def outcome(job: Job, log: str) -> Outcome:
    """The outcome of a job that has ended and whose output ends with `log`."""
    state, steps = _ENDING.findall(log)[-1] if _ENDING.search(log) else ("", "")
    if job.status == "FAILED":
        return Outcome(False, f"job {job.job} failed: {job.message}")
    if state == "stopped":
        return Outcome(True, f"job {job.job} was stopped after {steps} steps, with a checkpoint in {job.folder}")
    if state == "finished" or job.status == "SUCCEEDED":
        return Outcome(True, f"job {job.job} finished; the run is in {job.folder}")
    if "pentad: interrupted" in log:
        return Outcome(True, f"job {job.job} was stopped before it started training")
    allowed = f"cluster.stop_timeout_seconds = {job.stop_seconds:g}"
    return Outcome(False, f"job {job.job} was killed: it did not exit within {allowed}")


async def _follow(jobs: Jobs, job: str, write: Callable[[str], None]) -> tuple[Job, Outcome]:
    written, tail, heard = 0, "", time.monotonic()
    while True:
        position = 0
        async for text in _until_quiet(jobs.client.tail_job_logs(job)):
            heard = time.monotonic() if text else heard
            new, position = text[max(0, written - position) :], position + len(text)
            if new:
                written, tail = position, (tail + new)[-_TAIL:]
                write(new)
            if not text and _lookup(jobs, job, heard):
                heard = time.monotonic()
        found = _lookup(jobs, job, heard)
        if found and not found.is_live:
            return found, outcome(found, tail)
        await asyncio.sleep(1.0)


async def _until_quiet(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """The items of a stream until it ends or breaks, and '' whenever there was none for QUIET_SECONDS."""
    while True:
        task = asyncio.ensure_future(anext(stream, None))
        while not (await asyncio.wait({task}, timeout=QUIET_SECONDS))[0]:
            yield ""
        # Whatever the error, the caller opens another stream.
        if task.exception() is not None or (text := task.result()) is None:
            return
        yield text


def _lookup(jobs: Jobs, job: str, heard: float) -> Job | None:
    """The job; None if the cluster does not answer. Raises PentadError if that lasts for TIMEOUT_SECONDS."""
    try:
        return jobs.get(job)
    except PentadError:
        if time.monotonic() > heard + TIMEOUT_SECONDS:
            raise
        return None
