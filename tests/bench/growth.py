"""Detects leaks of processes: memory, file descriptors, threads, listening ports and files in shared memory.

Processes have one malloc arena (MALLOC_ARENA_MAX=1). By default glibc has eight a core, and each keeps the memory freed
in it: on two cores a driver then grew by 61 MB in a hundred recoveries, and by 21 MB with one arena.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

WARMUP = 5  # samples until caches are full


class Resources(NamedTuple):
    """The resources of one process. `rss` excludes shared pages."""

    rss: int
    fds: int
    threads: int
    listening: int


class Growth:
    """Samples the resources of named processes, and the totals of all processes of a run."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: dict[str, list[Resources]] = {name: [] for name in pids}
        self.totals: list[tuple[int, int, int]] = []  # processes, ports, descriptors

    def sample(self, members: Sequence[psutil.Process]) -> None:
        for name, process in self.processes.items():
            self.samples[name].append(resources(process))
        alive = [each for process in members if (each := _resources_if_alive(process))]
        self.totals.append((len(alive), sum(each.listening for each in alive), sum(each.fds for each in alive)))

    def summary(self) -> dict[str, Any]:
        trends: dict[str, Any] = {
            name: {field: _trend([getattr(sample, field) for sample in samples]) for field in Resources._fields}
            for name, samples in self.samples.items()
        }
        names = ("processes", "listening", "fds")
        trends["all"] = {
            name: _trend(values) for name, values in zip(names, zip(*self.totals, strict=True), strict=True)
        }
        return trends


def resources(process: psutil.Process) -> Resources:
    with process.oneshot():
        memory = process.memory_info()
        ports = sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))
        return Resources(memory.rss - memory.shared, process.num_fds(), process.num_threads(), ports)


def files_of(members: Sequence[psutil.Process]) -> set[Path]:
    """The files in shared memory that processes map, and their folders in /tmp."""
    files = set()
    for process in members:
        with suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path:
                    files.add(Path("/dev/shm", path))
            words = " ".join(process.cmdline()).replace("=", " ").split()
            files |= {Path(*Path(word).parts[:3]) for word in words if word.startswith("/tmp/pentad-ray-")}
    return {file for file in files if file.exists()}


def leftovers(members: Sequence[psutil.Process], files: set[Path], seconds: float = 5.0) -> dict[str, list[str]]:
    """The processes and files that still exist after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [str(p.pid) for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        existing = [str(file) for file in files if file.exists()]
        if not (alive or existing) or time.monotonic() > deadline:
            return {"processes": alive, "files": existing, "looked_at": [str(len(members)), str(len(files))]}
        time.sleep(0.1)


def _resources_if_alive(process: psutil.Process) -> Resources | None:
    with suppress(psutil.Error, OSError):
        return resources(process)
    return None


def _trend(values: Sequence[float]) -> dict[str, float]:
    """The first and last value, and the growth per sample after the warm-up."""
    warm = values[WARMUP:] if len(values) > 2 * WARMUP else values
    slope = statistics.linear_regression(range(len(warm)), warm).slope if len(warm) > 1 else 0.0
    return {"first": values[0], "last": values[-1], "growth_each": round(slope, 3)}
