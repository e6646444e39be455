"""What the probes of this folder measure: plain data, which is read without torch."""

from __future__ import annotations

from typing import NamedTuple


class Burned(NamedTuple):
    """What one unit, 'GPU 3' or 'CPU 5', did. `digest` is of its first product's bits, `differing` counts later
    products with other bits, and `error` is the largest one of the first in units of the rounding that is allowed.
    `rate` is in FLOP/s; `clock` in hertz and `throttles` are those under load, `clock_most` the GPU's highest."""

    unit: str
    model: str
    digest: str
    products: int
    differing: int
    error: float
    rate: float
    clock: float | None = None
    clock_most: float | None = None
    throttles: tuple[str, ...] = ()


class Link(NamedTuple):
    """Between two GPUs, by NVML's indices, or two nodes, by their ranks: bytes/s of large copies, seconds of each of
    many small ones in a row, and whether the source can write to the target's memory."""

    source: int
    target: int
    bandwidth: float
    latency: float
    has_peer_access: bool = False
