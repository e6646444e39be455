"""What is submitted as a job: this package, the resolved configuration, environment variables and metadata."""

from __future__ import annotations

import json
import math
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.cluster import PASSED_ON
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.version import release
from pentad.orchestrator.config.yaml_text import dump_yaml
from pentad.schedules.catalogue import FILE_SUFFIXES
from pentad.schedules.ir.regular_files import expanded

FOLDERS = ("orchestrator", "workers", "schedules", "kernels")
CONFIG = "job.yaml"
# exec, so that the driver gets Ray's signals; -P keeps the job's folder off sys.path.
ENTRYPOINT = f"exec python -P -u -m pentad.orchestrator.cli.cli train {CONFIG}"


def for_cluster(config: RunConfig, here: Path, *, is_open: bool = False) -> RunConfig:
    """The configuration of a job, which joins the cluster that it runs on, with absolute paths.

    A job's driver runs in a temporary folder, so relative paths are resolved against `here`, the user's working
    directory. If the cluster `is_open` (works without a token), the driver must not look for one.
    """
    raw = config.model_dump()
    raw["cluster"]["address"] = "auto"
    raw["cluster"]["auth"] = "disabled" if is_open else config.cluster.auth
    raw["run"]["folder"] = _absolute(config.run.folder, here)
    raw["data"]["cache"] = _absolute(config.data.cache, here)
    if config.run.init_from and "/" in config.run.init_from:  # otherwise it is the name of a run in run.folder
        raw["run"]["init_from"] = _absolute(config.run.init_from, here)
    if config.lora.init_from:
        raw["lora"]["init_from"] = _absolute(config.lora.init_from, here)
    for source in (raw["data"], *(raw["data"]["sources"] or ())):
        if source["path"] is not None and ":" not in source["path"]:
            source["path"] = _absolute(source["path"], here)
    return RunConfig.model_validate(raw)


def runtime_environment(config: RunConfig, out: Path) -> dict[str, Any]:
    """Ray's runtime_env for a job that trains `config`; writes the files that it names to `out`."""
    work = out / "job"
    work.mkdir()
    (work / CONFIG).write_text(dump_yaml(_with_files(config, work)), encoding="utf-8")
    return {"working_dir": str(work), "py_modules": [str(write_package(out))], "env_vars": variables(config)}


def _with_files(config: RunConfig, work: Path) -> dict[str, Any]:
    """The configuration's values, with the files of a custom schedule and model copied to `work`, the job's folder."""
    raw, name, custom = config.model_dump(), config.schedule.name, config.model.custom
    if ":" in name or name.endswith(FILE_SUFFIXES):
        file, colon, function = name.rpartition(":") if ":" in name else (name, "", "")
        shutil.copy(file, work)
        raw["schedule"]["name"] = f"{Path(file).name}{colon}{function}"
    if custom is not None:
        file, _, function = custom.rpartition(":")
        (work / "model").mkdir()  # a schedule's file may have the same name
        shutil.copy(file, work / "model")
        raw["model"]["custom"] = f"model/{Path(file).name}:{function}"
    return raw


def write_package(out: Path) -> Path:
    """Copies this package, from a checkout or an installation, to `out`/pentad."""
    (out / "pentad").mkdir(parents=True)
    top = find_spec("pentad")
    assert top is not None and top.origin is not None
    for path in Path(top.origin).parent.iterdir():
        if path.is_file():
            shutil.copy(path, out / "pentad")
    for name in FOLDERS:
        spec = find_spec(f"pentad.{name}")
        assert spec is not None and spec.submodule_search_locations
        source = next(iter(spec.submodule_search_locations))
        shutil.copytree(source, out / "pentad" / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return out / "pentad"


def variables(config: RunConfig) -> dict[str, str]:
    """The job's environment variables: this process's settings for collectives and threads, and how long Ray waits for
    the job to stop."""
    prefixes = tuple(name for name in PASSED_ON if name != "PYTHONPATH")
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return found | {"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(config.cluster.stop_timeout_seconds))}


def metadata(config: RunConfig) -> dict[str, str]:
    """What Ray's list of jobs shows about a job."""
    facts = {
        "version": release(),
        "run": config.run.name,
        "mesh": str(config.mesh.mesh),
        "schedule": config.schedule.name,
        "folder": str(Path(config.run.folder) / config.run.name),
        "config": json.dumps(config.model_dump(), separators=(",", ":")),
    }
    # job_name is the name on the dashboard's page of jobs.
    return {"job_name": config.run.name, **{f"pentad/{name}": fact for name, fact in facts.items()}}


def _absolute(path: str, here: Path) -> str:
    return os.path.normpath(here / expanded(path))
