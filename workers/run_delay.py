"""How long a thread was ready to run while others had the cores."""

from __future__ import annotations

import os
import threading

_of_thread = threading.local()


def run_delay() -> float:
    """Seconds that this thread has spent on a run queue so far: Linux's `run_delay` in /proc/thread-self/schedstat,
    which excludes the time that it sleeps, is stopped or waits for anything but a core. 0 if the kernel does not count
    it. Takes about two microseconds."""
    if not hasattr(_of_thread, "file"):
        try:
            _of_thread.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        except OSError:
            _of_thread.file = None
    if _of_thread.file is None:
        return 0.0
    return int(os.pread(_of_thread.file.fileno(), 128, 0).split()[1]) / 1e9
