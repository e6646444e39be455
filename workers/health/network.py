"""How fast a cluster's nodes exchange data with the library that a run's ranks use: NCCL on GPUs, else Gloo.

`python -m pentad.workers.health.network DEVICE ADDRESS RANK SIZE` prints a JSON list of what `measure_network` returns.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pentad.workers.health.results import Link
from pentad.workers.parallel.process_groups import join_store

TIMEOUT = 60.0  # seconds to meet, and for an exchange
ROUNDS = 4
LARGE, SMALL = {"cuda": 2**26, "cpu": 2**23}, 2**12  # bytes
LARGE_COPIES, SMALL_COPIES = 8, 50


def measure_network(device: str, address: str, rank: int, size: int) -> list[Link]:
    """Measures links of this node, `rank` of `size` nodes, between the nodes' first GPUs if they have any. The nodes
    meet at a store that is served at `address`, and all must call this.

    In each round the nodes form pairs that send both ways at once, so that a slow node affects only its partners'
    figures. Raises what torch raises if a node does not answer.
    """
    store = join_store(address, size, TIMEOUT)
    backend, gpu = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=gpu)
    found = []
    for number in range(min(ROUNDS, size - 1 + size % 2)):
        other = partner(rank, number, size)
        large = _seconds(device, other, LARGE[device], LARGE_COPIES)
        small = _seconds(device, other, SMALL, SMALL_COPIES)
        if other is not None:
            found.append(Link(other, rank, LARGE[device] / large, small))
    dist.destroy_process_group()
    return found


def partner(rank: int, number: int, size: int) -> int | None:
    """The node's partner in round `number` of a round-robin tournament (circle method); None if it has none."""
    last = size - 1 + size % 2
    other = number * (last + 1) // 2 % last if rank == last else (number - rank) % last
    other = last if other == rank else other
    return other if other < size else None


def _seconds(device: str, other: int | None, size: int, copies: int) -> float:
    """Mean seconds of an exchange over `copies`, after as many for warm-up."""
    data, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = 0.0
    for _ in range(2):
        dist.barrier()
        began = time.monotonic()
        for _ in range(copies if other is not None else 0):
            pair = [dist.P2POp(dist.isend, data, other), dist.P2POp(dist.irecv, into, other)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / copies
    return seconds


if __name__ == "__main__":
    name, meeting, *numbers = sys.argv[1:]
    print(json.dumps([each._asdict() for each in measure_network(name, meeting, *map(int, numbers))]))
