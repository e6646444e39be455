"""How fast each GPU of this machine copies to each of the others.

`python -m pentad.workers.health.links` prints what `measure_links` returns, as a JSON list.
"""

from __future__ import annotations

import json
from itertools import permutations

import torch

from pentad.workers.health.gpu_facts import index_of
from pentad.workers.health.results import Link

LARGE, SMALL = 2**28, 2**12  # bytes
LARGE_COPIES, SMALL_COPIES = 8, 100


def measure_links() -> list[Link]:
    """Measures copies by the copy engine between all ordered pairs of visible GPUs, one pair after the other."""
    numbers = [index_of(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]
    found = []
    for source, target in permutations(range(len(numbers)), 2):
        bandwidth = LARGE / _seconds(source, target, LARGE, LARGE_COPIES)
        latency = _seconds(source, target, SMALL, SMALL_COPIES)
        peer = torch.cuda.can_device_access_peer(source, target)
        found.append(Link(numbers[source], numbers[target], bandwidth, latency, peer))
    return found


def _seconds(source: int, target: int, size: int, copies: int) -> float:
    """Mean seconds of a copy over `copies`, after as many for warm-up."""
    here = torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}")
    seconds = 0.0
    with torch.cuda.device(source):
        for _ in range(2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(copies):
                there.copy_(here, non_blocking=True)
            end.record()
            end.synchronize()
            torch.cuda.synchronize(target)
            seconds = start.elapsed_time(end) / 1e3 / copies
    return seconds


if __name__ == "__main__":
    print(json.dumps([each._asdict() for each in measure_links()]))
