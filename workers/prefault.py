"""Pages of memory before they are needed. Needs no torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PART_BYTES = 64 << 20  # which a thread fills at a time
MOST_THREADS = 8  # of one rank: others of the host do the same


def prefault(memory: np.ndarray, part_bytes: int = PART_BYTES) -> None:
    """Has the kernel provide the pages of `memory` [bytes], which are zeros then, by several threads. It would else do
    so for the one that pins them or writes to them first: 3 GB/s, or 0.3 where a host has to back the pages of a
    virtual machine."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(
            lambda start: memory[start : start + part_bytes].fill(0), range(0, len(memory), part_bytes)
        ):
            pass
