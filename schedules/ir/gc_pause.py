"""Work on very many small values, without the garbage collector looking through them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """There are no cycles to find, and looking at all that is kept, over and over as it grows, takes as long as the
    work itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
