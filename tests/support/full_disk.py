"""Disks that appear full to a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size: int, process: int = 0) -> Iterator[None]:
    """Within the block, a process (0: this one) and those it starts cannot make a file larger than this many bytes: a
    write ends there, and the next one fails."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))
