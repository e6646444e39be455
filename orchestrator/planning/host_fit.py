"""Whether a host has enough memory for what its GPUs' ranks keep there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import ON_HOST, memory
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.hardware import NODE_GPUS, local_gpus
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

SPARE = 0.9  # of a host's memory may be pinned: the rest is for processes, their data and the page cache
CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


class HostMemory(NamedTuple):
    """`bytes` that the ranks of a host may have there; `where` says of which host."""

    bytes: float
    where: str

    def ranks(self, plan: Plan) -> int:
        """Ranks on a host."""
        return min(plan.mesh.size, NODE_GPUS)


def host_memory(config: RunConfig) -> HostMemory:
    """As configured, or of this machine or the container that this process is in."""
    if config.memory.host_gib is not None:
        return HostMemory(config.memory.host_gib * 2**30, f"memory.host_gib = {config.memory.host_gib:g}")
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is no such limit
            installed = min(installed, int(Path(path).read_text()))
    return HostMemory(SPARE * installed, f"{SPARE:.0%} of the {format_bytes(installed)} of this machine")


def host_bytes(plan: Plan, rank: int) -> int:
    """What a rank of the mesh has in host memory: offloaded activations, optimizer state, a checkpoint's copy."""
    found = memory(plan, rank)
    return sum(found[kind] for kind in ON_HOST)


def require_host(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError if the ranks of a host keep more there than it has. On CPUs that is all the same memory, and
    elsewhere than on this machine it is known only from memory.host_gib."""
    here = config.cluster.address == "local" and local_gpus() > 0
    if plan.device != "cuda" or (config.memory.host_gib is None and not here):
        return
    host, each = host_memory(config), [memory(plan, plan.mesh.move(0, pp=pp)) for pp in range(plan.mesh.pp)]
    fullest = max(each, key=lambda kinds: sum(kinds[kind] for kind in ON_HOST))
    needed = host.ranks(plan) * sum(fullest[kind] for kind in ON_HOST)
    if needed <= host.bytes:
        return
    names = {"host": "activations", "snapshot": "a checkpoint's copy", "host_optimizer": "optimizer state"}
    parts = ", ".join(f"{format_bytes(fullest[kind])} of {names[kind]}" for kind in ON_HOST if fullest[kind])
    key = (
        f"memory.offload_fraction is {config.memory.offload_fraction}"
        if fullest["host"]
        else (f"memory.optimizer is {config.memory.optimizer}")
    )
    found = f"{key}, with which {host.ranks(plan)} ranks of a host keep {format_bytes(needed)} there ({parts} each)"
    raise PentadError(f"{found}: expected at most {format_bytes(int(host.bytes))}, {host.where}")
