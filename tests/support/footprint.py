"""The processes and files of a run on this machine, identified by a mark in its environment."""

from __future__ import annotations

import os
import re
import time
import uuid
from pathlib import Path

from pentad.orchestrator.cluster.ray_head import psutil


class Footprint:
    """Start a run with `environment`, call `record` while it runs, and `assert_gone` afterwards.

    A port is released with its process. Files are temporary folders named in command lines, and shared memory in use.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.files: set[Path] = set()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "FOOTPRINT": self.mark}

    def processes(self) -> list[str]:
        return [f"{process.pid} {command}" for process, command in self._marked()]

    def record(self) -> None:
        for process, command in self._marked():
            self.files |= {Path(found) for found in re.findall(r"/tmp/pentad-ray-\w+", command)}
            try:
                maps = process.memory_maps()
            except psutil.Error:
                continue
            self.files |= {Path(found.path) for found in maps if found.path.startswith("/dev/shm/")}
        assert self.files, "looked too early or too late"

    def assert_gone(self, seconds: float = 5.0) -> None:
        until = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left

    def _left(self) -> list[str]:
        return [*self.processes(), *(str(file) for file in self.files if file.exists())]

    def _marked(self) -> list[tuple[psutil.Process, str]]:
        found = []
        for process in psutil.process_iter():
            try:
                # A zombie counts as gone: it only waits to be reaped.
                if process.environ().get("FOOTPRINT") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, " ".join(process.cmdline())))
            except psutil.Error:
                continue
        return found
