"""What processes hold: memory, descriptors, threads, ports and shared files, before and after."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

WARM = 5  # samples after which caches are full


class Held(NamedTuple):
    """By one process; `rss` are the bytes that are its own."""

    rss: int
    fds: int
    threads: int
    listening: int


class Found(NamedTuple):
    """Files in shared memory and folders in /tmp that processes use."""

    files: frozenset[Path]

    def __or__(self, other: Found) -> Found:
        return Found(self.files | other.files)


class Growth:
    """Of some processes by name, and of all of a run together, sample after sample."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: dict[str, list[Held]] = {name: [] for name in pids}
        self.together: list[tuple[int, int, int]] = []  # processes, ports, descriptors

    def sample(self, members: Sequence[psutil.Process]) -> None:
        for name, process in self.processes.items():
            self.samples[name].append(held(process))
        every = [one for process in members if (one := _held(process))]
        self.together.append((len(every), sum(one.listening for one in every), sum(one.fds for one in every)))

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: {field: _trend([getattr(one, field) for one in samples]) for field in Held._fields}
            for name, samples in self.samples.items()
        }
        names = ("processes", "listening", "fds")
        found["all"] = {name: _trend([one[i] for one in self.together]) for i, name in enumerate(names)}
        return found


def held(process: psutil.Process) -> Held:
    with process.oneshot():
        memory = process.memory_info()
        ports = sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))
        return Held(memory.rss - memory.shared, process.num_fds(), process.num_threads(), ports)


def look(members: Sequence[psutil.Process]) -> Found:
    """Files in shared memory that processes map, and their folders in /tmp."""
    files = set()
    for process in members:
        with suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path:
                    files.add(Path("/dev/shm", path))
            words = " ".join(process.cmdline()).replace("=", " ").split()
            files |= {Path(*Path(word).parts[:3]) for word in words if word.startswith("/tmp/pentad-ray-")}
    return Found(frozenset(file for file in files if file.exists()))


def left(members: Sequence[psutil.Process], found: Found, seconds: float = 5.0) -> dict[str, list[str]]:
    """What of them is still there."""
    until = time.monotonic() + seconds
    while True:
        alive = [str(p.pid) for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        files = [str(file) for file in found.files if os.path.exists(file)]
        if not (alive or files) or time.monotonic() > until:
            return {"processes": alive, "files": files, "looked_at": [str(len(members)), str(len(found.files))]}
        time.sleep(0.1)


def _held(process: psutil.Process) -> Held | None:
    with suppress(psutil.Error, OSError):
        return held(process)
    return None


def _trend(values: Sequence[float]) -> dict[str, float]:
    """First and last value, and how much it grows from one sample to the next once warm."""
    warm = values[WARM:] if len(values) > 2 * WARM else values
    slope = statistics.linear_regression(range(len(warm)), warm).slope if len(warm) > 1 else 0.0
    return {"first": values[0], "last": values[-1], "growth_each": round(slope, 3)}
