"""What RUN stands for: a run's folder, its name under runs/, or the ID of a submitted job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pentad.orchestrator.monitoring.runfolder import CONFIG, resolve_run
from pentad.schedules.ir.errors import PentadError

if TYPE_CHECKING:
    from pentad.orchestrator.jobs.jobs import Job, Jobs


def find_run(name: str, address: str | None) -> Path | tuple[Jobs, Job]:
    """The folder of a run; or a job, if `address` is given or no run has that name. Raises PentadError if there is
    neither."""
    no_run = None
    if address is None:
        try:
            return resolve_run(name)
        except PentadError as error:
            no_run = error
    from pentad.orchestrator.jobs.jobs import Jobs

    try:
        jobs = Jobs(address)
        return jobs, jobs.get(name)
    except PentadError as error:
        if no_run is None:
            raise
        raise PentadError(f"{no_run}; and as a job: {error}") from None


def folder_of(name: str, address: str | None) -> Path:
    """The folder of a run or of a job's run. Raises PentadError for a job whose folder is not visible from here."""
    found = find_run(name, address)
    if isinstance(found, Path):
        return found
    jobs, job = found
    folder = Path(job.folder)
    if not (folder / CONFIG).is_file():
        where = f"its folder {folder} is on the cluster at {jobs.address} and not visible from here"
        raise PentadError(f"job {job.job} is {job.status}, but {where}: expected a machine that shares it")
    return folder
