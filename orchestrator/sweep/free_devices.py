"""The devices that trials share: those of this machine or of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.planning.hardware import local_device, local_gpus
from pentad.schedules.ir.errors import PentadError

Device = Literal["cpu", "cuda"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_RANKS = 2**16  # most ranks of a trial on CPUs


@dataclass
class FreeDevices:
    """Free `devices`, one per rank; `most` is the most ranks of a trial. If a trial has more ranks than this machine
    has cores, they share the cores and the trial runs alone. GPUs of this machine have names (`named`); those of a
    cluster are chosen by Ray."""

    device: Device
    devices: list[str]
    most: int
    named: bool = False
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.devices)

    @property
    def sentence(self) -> str:
        kind = "GPUs" if self.device == "cuda" else "CPUs"
        return f"expected at most {self.most}, the {kind} that are free"

    def take(self, ranks: int) -> tuple[str, ...] | None:
        """Takes devices for this many ranks; None while too few are free."""
        needed = min(ranks, self.count)
        if needed > len(self.devices):
            return None
        taken, self.devices = tuple(self.devices[:needed]), self.devices[needed:]
        return taken

    def give_back(self, devices: tuple[str, ...]) -> None:
        self.devices = sorted([*self.devices, *devices], key=lambda name: (len(name), name))

    def variables(self, devices: tuple[str, ...]) -> Mapping[str, str]:
        """The environment variables for a trial's processes."""
        return {VISIBLE: ",".join(devices)} if self.named else {}


def find_free_devices(section: ClusterSection) -> FreeDevices:
    """The free devices of the machine or cluster on which a run would be. Raises PentadError if there are none."""
    if section.address != "local":
        return _on_cluster(section)
    if local_device(section, 1)[0] == "cpu":
        return FreeDevices("cpu", list(map(str, range(os.cpu_count() or 1))), MOST_RANKS)
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    names = visible[: local_gpus()] or list(map(str, range(local_gpus())))
    if not names:
        raise PentadError("cluster.device is cuda: expected a GPU on this machine")
    return FreeDevices("cuda", names, len(names), named=True)


def _on_cluster(section: ClusterSection) -> FreeDevices:
    import ray

    from pentad.orchestrator.cluster.cluster import join

    with join(section, 1, None) as cluster:
        free = int(ray.available_resources().get("GPU" if cluster.device == "cuda" else "CPU", 0))
        device: Device = "cuda" if cluster.device == "cuda" else "cpu"
    if not free:
        kind = "GPU" if device == "cuda" else "CPU"
        raise PentadError(f"cluster.address is {section.address}: expected a Ray cluster with a free {kind}")
    return FreeDevices(device, list(map(str, range(free))), free)
