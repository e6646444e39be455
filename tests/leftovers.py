"""What a run could leave behind on this machine: processes, listening ports, shared memory, temporary folders."""

from __future__ import annotations

import glob
import os
import time
from dataclasses import dataclass

from pentad.orchestrator.cluster import psutil


@dataclass(frozen=True)
class Leftovers:
    things: frozenset[str]

    @staticmethod
    def now() -> Leftovers:
        """Only what looks like Ray's or ours: other programs of this machine come and go."""
        found = {f"file {path}" for path in glob.glob("/tmp/pentad-ray-*") + glob.glob("/dev/shm/*")}
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:  # its new parent has yet to take note
                    continue
                command = " ".join(process.cmdline())
                if any(sign in command for sign in ("ray::", "ray/core", "ray-dashboard", "ray/_private", "pentad")):
                    ports = [c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
                    found |= {f"process {process.pid} {command[:200]}"} | {f"port {port} of {process.pid}" for port in ports}
            except psutil.Error:
                continue
        return Leftovers(frozenset(found - {f"process {os.getpid()}"}))

    def assert_nothing_more(self, seconds: float = 5.0) -> None:
        """Nothing more than at the time of this object, at the latest after so long: others may be at work too."""
        until = time.monotonic() + seconds
        while (more := Leftovers.now().things - self.things) and time.monotonic() < until:
            time.sleep(0.1)
        assert not more, sorted(more)
