"""Whether the ranks of a plan have enough memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import itemgetter

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.gpus.table import ASSUMED_GPU
from pentad.orchestrator.planning.estimate import ON_HOST, memories
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.hardware import figures_of, gpu_name, gpu_of, local_device
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

RESERVED = 2 * 2**30  # bytes of a GPU for the CUDA context, communicators and fragmentation


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes for tensors of each rank, or of all ranks if they share them; `where` names the device."""

    bytes: int
    where: str
    is_shared: bool = False


@dataclass(frozen=True)
class Fit:
    """Bytes needed on a device, the fullest rank, and its bytes by kind."""

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
        kinds = [(part, name) for name, part in self.by_kind.items() if part and name not in ("total", *ON_HOST)]
        shares = (f"{name} {format_bytes(part)}" for part, name in sorted(kinds, key=itemgetter(0), reverse=True))
        return f"does not fit: {text} (rank {self.rank}: {', '.join(shares)})"


def device_memory(device: str, gib: float | None = None, *, gpu: str = "") -> DeviceMemory:
    """Of `gib` GiB a rank if given, else of a GPU by its name ('': the assumed one), or of this machine, whose memory
    CPU ranks share. Raises PentadError for an unknown GPU that is not here."""
    if gib is not None:
        return DeviceMemory(int(gib * 2**30), f"of a device of {gib:g} GiB")
    if device == "cpu":
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(installed, "of this machine", is_shared=True)
    name = gpu or ASSUMED_GPU
    assumed = "" if name == gpu_name() else " (assumed)"
    return DeviceMemory(figures_of(name).memory - RESERVED, f"of an {name}{assumed}")


def device_of(config: RunConfig) -> tuple[str, DeviceMemory]:
    """'cpu' or 'cuda', what the ranks will have, and its memory; GPUs on a cluster that nobody has joined yet, unless
    the configuration says otherwise."""
    if config.cluster.address == "local":
        device, _ = local_device(config.cluster, config.mesh.size)
    else:
        device = "cpu" if config.cluster.device == "cpu" else "cuda"
    return device, device_memory(device, gpu=gpu_of(config.cluster))


def require_host_memory(plan: Plan) -> None:
    """Raises PentadError unless this host, which all ranks are on, has room for the copies of their state."""
    installed = device_memory("cpu").bytes
    needed = sum(each[kind] for each in memories(plan) for kind in ON_HOST)
    if plan.replicate_every and needed > installed:
        copies = format_bytes(sum(each["copies"] for each in memories(plan)))
        found = f"elastic.replicate_every is {plan.replicate_every}, and the copies of all ranks take {copies}"
        has = f"of {format_bytes(needed)} of host memory that the run needs, but this machine has"
        raise PentadError(f"{found} {has} {format_bytes(installed)}: expected more, or 0")


def fit_of(plan: Plan, device: DeviceMemory) -> Fit:
    """Whether all ranks have enough memory, by the planner's estimate."""
    ranks = memories(plan)
    fullest = max(range(plan.mesh.size), key=lambda rank: ranks[rank]["total"])
    shared = sum(each[kind] for each in ranks for kind in ("total", *ON_HOST))
    return Fit(device, shared if device.is_shared else ranks[fullest]["total"], fullest, ranks[fullest])
