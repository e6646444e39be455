"""Prints what the first GPU attains, as JSON: bytes of memory, FLOP/s of products in bfloat16 and 8 bits (0: none), and
bytes/s of copies within its memory and to the host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

SIZE = 8192  # of the factors
COPIED = 2**28  # bytes
REPEATS = 10
WARM_UP = 2.0  # seconds of products, while a power limit lowers clocks (docs/performance.md)


def main() -> None:
    device = torch.device("cuda", 0)
    factors = [torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
    source, target = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    until = time.monotonic() + WARM_UP
    while time.monotonic() < until:
        seconds(lambda: torch.mm(*factors))
    found = {
        "memory": torch.cuda.mem_get_info(device)[1],
        "bf16": 2 * SIZE**3 / seconds(lambda: torch.mm(*factors)),
        "fp8": 0.0,
        "bandwidth": 2 * COPIED / seconds(lambda: target.copy_(source)),
        "host_link": COPIED / seconds(lambda: host.copy_(source, non_blocking=True)),
    }
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a, b = (factor.to(torch.float8_e4m3fn) for factor in factors)
        one = torch.ones((), device=device)
        product = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
        found["fp8"] = 2 * SIZE**3 / seconds(product)
    print(json.dumps(found))


def seconds(work: Callable[[], object]) -> float:
    """Mean seconds of REPEATS runs, after as many to warm up."""
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / REPEATS)
    return times[-1]


if __name__ == "__main__":
    main()
