"""Clock and power of a GPU while ranks train: under its power limit, the clock bounds the rate of products."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import NamedTuple

import torch

from pentad.workers.runtime.telemetry import read_gpu

SECONDS = 0.2  # between two samples


class Sample(NamedTuple):
    """At a second of the monotonic clock: SM clock in MHz, power in watts, and why the driver lowers the clock."""

    at: float
    clock: float
    power: float
    throttles: tuple[str, ...]


@contextmanager
def sampled(device: int) -> Iterator[list[Sample]]:
    """Samples a CUDA device of this process within the block; none without NVML."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = int(visible.split(",")[device]) if visible else device
    samples, ended = list[Sample](), threading.Event()

    def sample() -> None:
        while not ended.wait(SECONDS):
            state = read_gpu(index) if torch.cuda.is_initialized() else None
            if state and state.clock and state.power:
                samples.append(Sample(time.monotonic(), state.clock / 1e6, state.power, state.throttles or ()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def clocks(samples: list[Sample], begin: float, end: float) -> dict[str, float]:
    """Means of the samples between two seconds, and the share of them in which power limits the clock; empty if there
    are none."""
    taken = [each for each in samples if begin <= each.at <= end]
    if not taken:
        return {}
    return {
        "sm_mhz": round(fmean(each.clock for each in taken)),
        "watts": round(fmean(each.power for each in taken)),
        "power_limited": round(fmean("power" in each.throttles for each in taken), 3),
    }
