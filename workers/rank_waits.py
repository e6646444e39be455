"""How the train thread waits for other ranks: `with rank_waits.abandonable()`, where an abort may leave it behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class RankWaits:
    """The waits of this process's rank. With a GPU the host never waits for a rank, and is never left behind."""

    abandonable: Callable[[], AbstractContextManager[None]] = nullcontext


rank_waits = RankWaits()
