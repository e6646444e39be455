"""Pauses the garbage collector while a great many small objects are made, or while nothing may be freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """For work whose objects form no cycles, where repeated scans would take as long as the work, and for work that a
    finalizer would disturb."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
