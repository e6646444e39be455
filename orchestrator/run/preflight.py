"""Checks before a run starts or writes anything. Needs neither Ray nor torch, so mistakes are reported within a
second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.devices import local_device
from pentad.orchestrator.cluster.ports import check_port_free
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.runfolder import CHECKPOINTS, check_not_live, check_resumable, path_of
from pentad.orchestrator.planning.fit import first_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.manifest import decode
from pentad.workers.data.sources import check_data, open_data, require_fingerprint


def prepare(config: RunConfig) -> tuple[Plan, str]:
    """The plan of a run and its corpus's fingerprint, before anything is started or written, except for a built-in
    corpus. Raises PentadError."""
    data = config.data.path, config.model.vocab, config.batch.sequence_length, config.data.cache
    check_data(*data)
    plan = first_plan(config, local_device(config.cluster, config.mesh.size)[0])
    return plan, open_data(*data, verify=True).fingerprint


def check(config: RunConfig, fingerprint: str) -> bool:
    """Whether the run has all of its run.steps already, in a checkpoint that is intact. `fingerprint` is the corpus's.

    Raises PentadError when the run's folder is in use or holds another model, batch, seed or corpus, or a port is
    taken.
    """
    check_not_live(config)
    check_resumable(config)
    check_port_free("metrics.port", config.metrics.host, config.metrics.port)
    check_port_free("metrics.control_port", config.metrics.host, config.metrics.control_port)
    checkpoints = path_of(config) / CHECKPOINTS
    step, meta = _newest_manifest(checkpoints)
    if meta.get("data"):
        require_fingerprint(config.data.path, fingerprint, meta["data"])
    if step < config.run.steps:
        return False
    from pentad.workers.checkpoint.checkpoint import newest  # imports torch

    found = newest(checkpoints).checkpoint
    return found is not None and found.step >= config.run.steps


def _newest_manifest(checkpoints: Path) -> tuple[int, dict[str, Any]]:
    """Steps and metadata of the newest checkpoint whose manifest is intact; its tensors are not read."""
    for path in sorted(checkpoints.glob("step-*/manifest.json"), reverse=True):
        try:
            manifest = decode(path.read_bytes())
        except (OSError, PentadError):
            continue
        return manifest.step, manifest.meta
    return 0, {}
