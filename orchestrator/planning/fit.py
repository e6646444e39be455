"""Whether a plan's ranks have room on their devices, known before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.hardware import ASSUMED, DEVICES, NODE
from pentad.orchestrator.planning.planning import make_plan, require_shards
from pentad.orchestrator.planning.quantities import size
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

BESIDES = 2 * 2**30  # bytes of a GPU for CUDA's context, communicators, and what an allocator leaves unused


@dataclass(frozen=True)
class Room:
    """Bytes for tensors, of each rank or, where they share them, of `all`; `where` says of what."""

    bytes: int
    where: str
    shared: bool = False


@dataclass(frozen=True)
class Fit:
    """`needed` of `room`; the fullest rank, and what it needs by kind."""

    room: Room
    needed: int
    rank: int
    parts: dict[str, int]

    @property
    def ok(self) -> bool:
        return self.needed <= self.room.bytes

    @property
    def sentence(self) -> str:
        """'does not fit: ...' with the numbers."""
        who = "all ranks" if self.room.shared else f"rank {self.rank}"
        needs = f"{who} together need" if self.room.shared else f"{who} needs"
        word = "fits" if self.ok else "does not fit"
        return f"{word}: {needs} {size(self.needed)} {self.room.where}, which has {size(self.room.bytes)}{self._most()}"

    def _most(self) -> str:
        kinds = {name: part for name, part in self.parts.items() if part and name not in ("total", "host")}
        found = ", ".join(f"{name} {size(kinds[name])}" for name in sorted(kinds, key=kinds.__getitem__, reverse=True))
        return "" if self.ok else f" (rank {self.rank}: {found})"


def room_of(device: str, gib: float | None = None) -> Room:
    """On a CPU ranks share this machine's memory; of a GPU that is not here an H200 is assumed. `gib` GiB a rank are
    asked for otherwise."""
    if gib is not None:
        return Room(int(gib * 2**30), f"of a device of {gib:g} GiB")
    if device == "cpu":
        return Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "of this machine", shared=True)
    name = gpu_name()
    known = name if name in DEVICES else ASSUMED
    return Room(DEVICES[known].memory - BESIDES, f"of an {known}" + ("" if name == known else " (assumed)"))


def fit_of(plan: Plan, room: Room) -> Fit:
    each = memories(plan)
    fullest = max(range(plan.mesh.size), key=lambda rank: each[rank]["total"])
    needed = sum(parts["total"] + parts["host"] for parts in each) if room.shared else each[fullest]["total"]
    return Fit(room, needed, fullest, each[fullest])


def first_plan(config: RunConfig, device: str, fingerprint: str = "") -> Plan:
    """The plan that a run begins with, made before anything is started or written.

    On a local cluster its ranks must have room on 'cpu' or 'cuda' devices of this machine, as far as those are known.
    For another cluster the plan assumes GPUs, unless the configuration says otherwise, and hosts of NODE of them; the
    driver makes it again if it finds something else. Raises PentadError.
    """
    if config.cluster.address == "local":
        plan = make_plan(config, device, fingerprint=fingerprint)
        found = fit_of(plan, room_of(device))
        if not found.ok and (device == "cpu" or gpu_name() in DEVICES):
            raise PentadError(f"run {config.run.name} {found.sentence}")
    else:
        device = "cpu" if config.cluster.device == "cpu" else "cuda"
        spans_hosts = config.mesh.size > NODE and config.cluster.transport != "peer"
        plan = make_plan(config, device, hosts=1 + spans_hosts, fingerprint=fingerprint)
    require_shards(config, plan)
    return plan


def gpu_name() -> str:
    """What the driver calls the first GPU of this machine, '' where there is none."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return ""
