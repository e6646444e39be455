"""Whether the ranks of a plan have enough memory, found out before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.hardware import ASSUMED_DEVICE, DEVICES, NODE_GPUS
from pentad.orchestrator.planning.planning import make_plan, require_shards
from pentad.orchestrator.planning.quantities import size
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
        text = f"{needs} {size(self.needed)} {self.device.where}, which has {size(self.device.bytes)}"
        return f"fits: {text}" if self.ok else f"does not fit: {text} (rank {self.rank}: {self._kinds()})"

    def _kinds(self) -> str:
        kinds = {name: part for name, part in self.by_kind.items() if part and name not in ("total", "host")}
        return ", ".join(f"{name} {size(kinds[name])}" for name in sorted(kinds, key=kinds.__getitem__, reverse=True))


def device_memory(device: str, gib: float | None = None) -> DeviceMemory:
    """Of `gib` GiB a rank if given, else of this machine: CPU ranks share its memory; without a GPU an H200 is
    assumed."""
    if gib is not None:
        return DeviceMemory(int(gib * 2**30), f"of a device of {gib:g} GiB")
    if device == "cpu":
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(installed, "of this machine", is_shared=True)
    name = known_gpu()
    assumed = "" if name == gpu_name() else " (assumed)"
    return DeviceMemory(DEVICES[name].memory - RESERVED, f"of an {name}{assumed}")


def fit_of(plan: Plan, device: DeviceMemory) -> Fit:
    """Whether all ranks have room, by the planner's estimate."""
    ranks = memories(plan)
    fullest = max(range(plan.mesh.size), key=lambda rank: ranks[rank]["total"])
    shared = sum(each["total"] + each["host"] for each in ranks)
    return Fit(device, shared if device.is_shared else ranks[fullest]["total"], fullest, ranks[fullest])


def first_plan(config: RunConfig, device: str, fingerprint: str = "") -> Plan:
    """The plan that a run begins with, made before anything is started or written.

    On a local cluster, ranks must fit on the 'cpu' or 'cuda' devices of this machine, if those are known. Raises
    PentadError.
    """
    if config.cluster.address != "local":
        return assumed_plan(config, fingerprint)
    plan = make_plan(config, device, fingerprint=fingerprint)
    require_shards(config, plan)
    found = fit_of(plan, device_memory(device))
    if not found.ok and (device == "cpu" or gpu_name() in DEVICES):
        raise PentadError(f"run {config.run.name} {found.sentence}")
    return plan


def assumed_plan(config: RunConfig, fingerprint: str = "") -> Plan:
    """The plan for a cluster that nobody has joined yet: with GPUs unless the configuration says otherwise, and
    NODE_GPUS a host. `plan_on` corrects it."""
    device = "cpu" if config.cluster.device == "cpu" else "cuda"
    spans_hosts = config.mesh.size > NODE_GPUS and config.cluster.transport != "peer"
    plan = make_plan(config, device, hosts=1 + spans_hosts, fingerprint=fingerprint)
    require_shards(config, plan)
    return plan


def gpu_name() -> str:
    """The driver's name of this machine's first GPU, '' without one."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return ""


def known_gpu() -> str:
    """This machine's GPU if its figures are known, else the assumed one."""
    name = gpu_name()
    return name if name in DEVICES else ASSUMED_DEVICE
