"""What arguments of commands stand for: RUN is a run's folder, its name under runs/, or the ID of a submitted job; no
CONFIG is the quickstart, on the GPUs of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pentad.orchestrator.monitoring.runfolder import CONFIG, resolve_run
from pentad.schedules.ir.errors import PentadError

if TYPE_CHECKING:
    from pentad.orchestrator.jobs.jobs import Job, Jobs


def find_run(name: str, address: str | None) -> Path | tuple[Jobs, Job]:
    """The folder of a run, or with `address`, or when no run has that name, a job. Raises PentadError for neither."""
    no_run = None
    if address is None:
        try:
            return resolve_run(name)
        except PentadError as error:
            no_run = error
        except OSError as error:
            reason = f"which cannot be read ({error.strerror}): expected a run of yours"
            raise PentadError(f"RUN is '{name}', {reason}") from None
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


def for_this_machine(path: Path | None, overrides: list[str]) -> tuple[list[str], str]:
    """The overrides of the quickstart with a pipeline as long as this machine has GPUs, if that is shorter, and a note
    that says so. Any other configuration, and any override of mesh or cluster, is left as it is."""
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.planning.hardware import local_gpus

    gpus = local_gpus()
    if path is not None or not gpus or any(each.startswith(("mesh.", "cluster.")) for each in overrides):
        return overrides, ""
    ranks = load(None, []).mesh.pp
    if gpus >= ranks:
        return overrides, ""
    count = f"{gpus} GPU" + "s" * (gpus > 1)
    note = f"this machine has {count}: the quickstart runs with mesh.pp = {gpus}, not {ranks}"
    return [*overrides, f"mesh.pp={gpus}"], note
