"""Processes that measure the network between them, one of which may be slow."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor

import torch.distributed as dist
from pool import process_context

from pentad.workers.health import network
from pentad.workers.health.results import Link
from pentad.workers.parallel.process_groups import start_store

DELAY = 0.3  # seconds that the slow one adds to each large exchange


def measure_all(size: int, slow: int) -> list[list[Link]]:
    """The links measured by each of `size` processes."""
    store = start_store("127.0.0.1", size, 60.0)
    with ProcessPoolExecutor(size, process_context()) as pool:
        calls = [pool.submit(_measure, f"127.0.0.1:{store.port}", rank, size, rank == slow) for rank in range(size)]
        return [call.result() for call in calls]


def _measure(address: str, rank: int, size: int, is_slow: bool) -> list[Link]:
    network.LARGE_COPIES, network.SMALL_COPIES = 2, 5
    exchange = dist.batch_isend_irecv

    def slowly(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        time.sleep(DELAY if p2p_op_list[0].tensor.numel() > network.SMALL else 0.0)
        return exchange(p2p_op_list)

    if is_slow:
        dist.batch_isend_irecv = slowly
    return network.measure_network("cpu", address, rank, size)
