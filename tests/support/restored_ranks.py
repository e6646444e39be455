"""What a benchmark's rank does until it begins to train, with late ranks."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from ranks import connected

from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.runner import Runner


def when_restored_and_begun(connection: Connection, plan: Plan, rank: int) -> tuple[float, float]:
    """When a rank had its initial weights, and when its work began; rank r takes r seconds longer."""
    restore, restored = Runner.restore, list[float]()

    def slow_restore(runner: Runner, folder: str | None) -> None:
        time.sleep(rank)
        restore(runner, folder)
        restored.append(time.monotonic())

    Runner.restore = slow_restore  # type: ignore[assignment,method-assign]
    with connected(connection, plan, rank):
        return restored[0], time.monotonic()
