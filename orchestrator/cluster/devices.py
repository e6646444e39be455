"""GPUs of this machine, found without torch, Ray or NVML."""

from __future__ import annotations

import os
from pathlib import Path

from pentad.orchestrator.config.sections import ClusterSection


def local_gpus() -> int:
    """Number of GPUs that CUDA_VISIBLE_DEVICES leaves a process on this machine."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]))


def local_device(section: ClusterSection, ranks: int) -> tuple[str, str]:
    """The device of a local run's ranks, 'cpu' or 'cuda', and a note for the user. With fewer GPUs than ranks, 'auto'
    is 'cpu', and the note says so."""
    if section.device != "auto":
        return section.device, ""
    gpus = local_gpus()
    if 0 < gpus < ranks:
        return "cpu", f"{ranks} ranks need a GPU each, but this machine has {gpus}: training on CPUs"
    return ("cuda" if gpus else "cpu"), ""
