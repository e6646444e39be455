"""RAM of this host, and of the container that this process is in."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # of version 2 and 1: limit, in use, and the file and key of what of that is a cache
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def installed_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes() -> tuple[int, int] | None:
    """What a container may use, and what it uses but for a cache, which the kernel gives back. None without a limit
    ('max')."""
    for limit, used, statistics, cache in CGROUP_FILES:
        try:
            lines = dict(line.split() for line in (CGROUP / statistics).read_text().splitlines())
            in_use = int((CGROUP / used).read_text()) - int(lines.get(cache, 0))
            return int((CGROUP / limit).read_text()), in_use
        except (OSError, ValueError):
            continue
    return None
