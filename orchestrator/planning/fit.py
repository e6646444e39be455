"""Whether the ranks of a plan have enough memory, on their devices and on their hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.gpus.table import ASSUMED_GPU
from pentad.orchestrator.planning.estimate import ON_HOST, memories, memory, pipeline_memories
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.hardware import NODE_GPUS, figures_of, gpu_name, gpu_of, local_device, local_gpus
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

# What a GPU's memory leaves for tensors after the CUDA context, libraries and communicators (2.6 GiB with cp2 and
# ZeRO-3); the margin is for holes in torch's segments (1 % was measured) and for errors of plans.
SHARE, BESIDE = 0.98, 2 * 2**30
PINNABLE = 0.9  # of a host's memory: the rest is for processes, their data and the page cache
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # cgroup v2 and v1: limit, usage, and the file and key that say how much of the usage is cache
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes for tensors on the device of each rank, or of all ranks together if they share it; `where` names the
    device."""

    bytes: int
    where: str
    is_shared: bool = False


@dataclass(frozen=True)
class Fit:
    """Bytes needed on a device, the fullest rank, and that rank's bytes by kind."""

    device: DeviceMemory
    needed: int
    rank: int
    by_kind: dict[str, int]

    @property
    def ok(self) -> bool:
        return self.needed <= self.device.bytes

    @property
    def sentence(self) -> str:
        """'fits: rank 0 needs ...', or 'does not fit: ...' with the bytes by kind."""
        needs = "all ranks together need" if self.device.is_shared else f"rank {self.rank} needs"
        text = f"{needs} {format_bytes(self.needed)} {self.device.where}, which has {format_bytes(self.device.bytes)}"
        if self.ok:
            return f"fits: {text}"
        others = ("total",) if self.device.is_shared else ("total", *ON_HOST)
        kinds = [(part, name) for name, part in self.by_kind.items() if part and name not in others]
        shares = (f"{name} {format_bytes(part)}" for part, name in sorted(kinds, key=itemgetter(0), reverse=True))
        return f"does not fit: {text} (rank {self.rank}: {', '.join(shares)})"


def device_memory(device: str, gib: float | None = None, *, gpu: str = "") -> DeviceMemory:
    """The memory of a device: `gib` GiB a rank if given; else that of the GPU of this name ('': the assumed one), or of
    this machine, whose memory CPU ranks share. Raises PentadError for an unknown GPU that is not in this machine."""
    if gib is not None:
        return DeviceMemory(int(gib * 2**30), f"of a device of {gib:g} GiB")
    if device == "cpu":
        return DeviceMemory(installed_bytes(), "of this machine", is_shared=True)
    name = gpu or ASSUMED_GPU
    assumed = "" if name == gpu_name() else " (assumed)"
    return DeviceMemory(for_tensors(figures_of(name).memory), f"of an {name}{assumed}")


def for_tensors(memory: int) -> int:
    """Bytes of a GPU's memory that a plan may fill."""
    return int(SHARE * memory) - BESIDE


def device_of(config: RunConfig) -> tuple[str, DeviceMemory]:
    """The kind of device that ranks will have, 'cpu' or 'cuda', and its memory. On a cluster that has not been joined
    yet that is GPUs, unless the configuration says otherwise."""
    if config.cluster.address == "local":
        device, _ = local_device(config.cluster, config.mesh.size)
    else:
        device = "cpu" if config.cluster.device == "cpu" else "cuda"
    return device, device_memory(device, gpu=gpu_of(config.cluster))


def fit_of(plan: Plan, device: DeviceMemory) -> Fit:
    """Whether every rank has enough memory, by the planner's estimate."""
    return fit_of_ranks(memories(plan), device)


def fit_of_ranks(ranks: Sequence[dict[str, int]], device: DeviceMemory) -> Fit:
    """`fit_of`, from the `memories` of a plan."""
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["total"])
    shared = sum(each[kind] for each in ranks for kind in ("total", *ON_HOST))
    return Fit(device, shared if device.is_shared else ranks[fullest]["total"], fullest, ranks[fullest])


class HostMemory(NamedTuple):
    """`bytes` of a host's memory that its ranks may use; `where` says which host."""

    bytes: float
    where: str


def host_memory(config: RunConfig, device: str) -> HostMemory | None:
    """The host memory that is configured, or that of this machine or of the container of this process; None (unknown)
    if GPUs are elsewhere."""
    if config.memory.host_gib is not None:
        return HostMemory(config.memory.host_gib * 2**30, f"memory.host_gib = {config.memory.host_gib:g}")
    if device == "cuda" and not (config.cluster.address == "local" and local_gpus()):
        return None
    size = installed_bytes()
    if (container := container_bytes()) is not None:
        size = min(size, container[0])
    return HostMemory(PINNABLE * size, f"{PINNABLE:.0%} of the {format_bytes(size)} of this machine")


def host_bytes(plan: Plan, rank: int) -> int:
    """Bytes that a rank keeps in host memory: offloaded activations, optimizer state, a checkpoint's copy."""
    found = memory(plan, rank)
    return sum(found[kind] for kind in ON_HOST)


def require_host(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError if the ranks of a host keep more in its memory than it has, as far as that is known. Does not
    apply to CPU ranks, whose device memory is the host's."""
    host = host_memory(config, plan.device)
    if plan.device != "cuda" or host is None or _needed_on_host(plan) <= host.bytes:
        return
    raise PentadError(f"{_kept_there(config, plan)}: expected at most {format_bytes(int(host.bytes))}, {host.where}")


def require_free_memory(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError if the ranks of a run on this machine would keep more in its memory than is free."""
    free = free_bytes()
    if plan.device == "cuda" and free is not None and _needed_on_host(plan) > free:
        limit = f"at most {format_bytes(free)}, which this machine has free"
        raise PentadError(f"{_kept_there(config, plan)}: expected {limit}")


def _kept_there(config: RunConfig, plan: Plan) -> str:
    """What the ranks of a host keep in its memory, named by the key that takes the most."""
    fullest, ranks, needed = _fullest_on_host(plan), ranks_of_host(plan), _needed_on_host(plan)
    every = "every" if config.checkpoint.every else "every_seconds"
    names = {
        "host": ("activations", f"memory.offload_fraction is {config.memory.offload_fraction}"),
        "host_optimizer": ("optimizer state", f"memory.optimizer is {config.memory.optimizer}"),
        "compared": ("gradients", f"precision.compare_every is {config.precision.compare_every}"),
        "copies": ("copies of state", f"elastic.replicate_every is {config.elastic.replicate_every}"),
        "snapshot": ("a checkpoint's copy", f"checkpoint.{every} is {getattr(config.checkpoint, every):g}"),
    }
    parts = ", ".join(f"{format_bytes(fullest[kind])} of {names[kind][0]}" for kind in ON_HOST if fullest[kind])
    _, key = names[max(ON_HOST, key=fullest.__getitem__)]
    who, each_has = (f"{ranks} ranks of a host keep", " each") if ranks > 1 else ("the rank of a host keeps", "")
    return f"{key}, with which {who} {format_bytes(needed)} there ({parts}{each_has})"


def host_note(config: RunConfig, plan: Plan) -> str:
    """A sentence if it is unknown whether hosts have enough memory for activations or optimizer state; else ''."""
    if plan.device != "cuda" or host_memory(config, "cuda") is not None:
        return ""
    fullest = _fullest_on_host(plan)
    if not fullest["host"] and not fullest["host_optimizer"]:
        return ""
    needed, ranks = format_bytes(_needed_on_host(plan)), ranks_of_host(plan)
    who = f"the {ranks} ranks of a host keep" if ranks > 1 else "the rank of a host keeps"
    return f"memory.host_gib is null, so it was not checked that a host has the {needed} that {who} there"


def _fullest_on_host(plan: Plan) -> dict[str, int]:
    """What the rank that uses the most host memory keeps there."""
    return max(pipeline_memories(plan), key=lambda kinds: sum(kinds[kind] for kind in ON_HOST))


def _needed_on_host(plan: Plan) -> int:
    return ranks_of_host(plan) * sum(_fullest_on_host(plan)[kind] for kind in ON_HOST)


def ranks_of_host(plan: Plan) -> int:
    """The number of ranks on a host."""
    return min(plan.mesh.size, NODE_GPUS)


def fits_host(config: RunConfig, plan: Plan) -> bool:
    """Whether `require_host` passes."""
    try:
        require_host(config, plan)
    except PentadError:
        return False
    return True


def installed_bytes() -> int:
    """Bytes of RAM in this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """Bytes that this host, or the container, can still give; None if unknown."""
    available, container = memory_facts().get("MemAvailable"), container_bytes()
    if available is None or container is None:
        return available
    return min(available, container[0] - container[1])


def memory_facts() -> dict[str, int]:
    """/proc/meminfo of this host, in bytes by Linux's names; empty where there is none."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs}


def container_bytes() -> tuple[int, int] | None:
    """A container's limit, and its usage without the cache that the kernel can reclaim, in bytes. None without a limit
    ('max')."""
    for limit, used, statistics, cache in CGROUP_FILES:
        try:
            lines = dict(line.split() for line in (CGROUP / statistics).read_text().splitlines())
            in_use = int((CGROUP / used).read_text()) - int(lines.get(cache, 0))
            return int((CGROUP / limit).read_text()), in_use
        except (OSError, ValueError):
            continue
    return None
