"""Processes that calibrate this machine together, with so little work that it takes no time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from pool import process_context

from pentad.workers.health import calibration
from pentad.workers.health.device_rates import Sizes
from pentad.workers.parallel.process_groups import start_store

SIZES = Sizes(1e-4, 0.0, ((8, 8, 8),), (16,), (16,), (16, 16, 32), (8, 8, 8, (2,)), 2**8, (2**8, 2**10), (2**8, 2**10))


def calibrate_all(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank on these hosts found."""
    store = start_store("127.0.0.1", len(hosts), 60.0)
    with ProcessPoolExecutor(len(hosts), process_context()) as pool:
        calls = [pool.submit(_calibrate, f"127.0.0.1:{store.port}", rank, list(hosts)) for rank in range(len(hosts))]
        return [call.result() for call in calls]


def _calibrate(address: str, rank: int, hosts: list[int]) -> dict[str, Any]:
    calibration.SIZES["cpu"] = SIZES
    return calibration.calibrate("cpu", -1, address, rank, hosts)
