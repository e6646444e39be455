"""The results of this folder's probes: plain data that can be read without torch."""

from __future__ import annotations

from typing import NamedTuple


class Burned(NamedTuple):
    """The burn-in of one unit, such as 'GPU 3' or 'CPU 5'. `digest` is of the bits of its first product, `differing`
    counts later products with other bits, and `error` is the largest error in the first, in units of the allowed
    rounding error. `rate` is in FLOP/s; `clock` (hertz) and `throttles` are under load, `clock_most` is the GPU's
    highest clock."""

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
    """A link between two GPUs, by NVML's indices, or two nodes, by their ranks: bytes/s of large copies, seconds per
    copy of many small ones in a row, and whether the source can access the target's memory."""

    source: int
    target: int
    bandwidth: float
    latency: float
    has_peer_access: bool = False
