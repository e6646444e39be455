"""At which clocks the ranks' GPUs compute, and what holds these down, in a row of metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from pentad.workers.runtime.telemetry import GpuState

KEY = "gpus"  # of a row of metrics.jsonl
_CAUSES = {"power": "the power limit", "thermal": "heat", "hardware": "a slowdown by hardware"}  # by key of THROTTLES


@dataclass(frozen=True)
class GpuClocks:
    """Means over `count` GPUs: the SM clock and its maximum in hertz, the power in watts; and how many of these GPUs
    each reason, a key of THROTTLES, holds down."""

    count: int
    clock_hertz: float
    clock_most_hertz: float
    power_watts: float
    throttled: dict[str, int]

    @property
    def slowdown(self) -> float:
        """How many times as long what the clock bounds takes as at the maximum; 1 if nothing holds the clock down."""
        return self.clock_most_hertz / self.clock_hertz if self.throttled else 1.0

    @property
    def reason(self) -> str:
        """The reason that holds down most GPUs; '' if none does."""
        return max(self.throttled, key=lambda name: self.throttled[name], default="")

    @property
    def cause(self) -> str:
        """The reason in words."""
        return _CAUSES.get(self.reason, self.reason)

    def __str__(self) -> str:
        megahertz, most = self.clock_hertz / 1e6, self.clock_most_hertz / 1e6
        text = f"{megahertz:,.0f} of {most:,.0f} MHz and {self.power_watts:,.0f} W"
        if not self.reason:
            return text
        return f"{text}; {self.cause} holds down {self.throttled[self.reason]} of {self.count}"


def clocks_of(states: Iterable[GpuState]) -> GpuClocks | None:
    """The clocks of the GPUs that report clock and power; None if none does."""
    known = [(each, each.clock, each.clock_most, each.power) for each in states]
    found = [(state, clock, most, power) for state, clock, most, power in known if clock and most and power]
    if not found:
        return None
    states, *columns = zip(*found, strict=True)
    clock, most, power = map(fmean, columns)
    throttled = Counter(reason for state in states for reason in state.throttles or ())
    return GpuClocks(len(found), clock, most, power, dict(throttled))


def row_of(states: Iterable[GpuState]) -> dict[str, Any]:
    """What a row of metrics.jsonl has of the clocks."""
    clocks = clocks_of(states)
    return {} if clocks is None else {KEY: asdict(clocks)}


def clocks_in(row: dict[str, Any]) -> GpuClocks | None:
    """The clocks in a row of metrics.jsonl, if it has any."""
    return GpuClocks(**row[KEY]) if KEY in row else None
