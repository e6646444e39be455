"""A self-contained HTML page with the memory of every rank over a step, stacked by kind and by unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pentad.schedules.draw.page import html_page
from pentad.schedules.ir.errors import PentadError

# Fills of the layers, lowest first, on light and dark backgrounds; the activations of units alternate between the last
# two.
COLOURS = {
    "fixed": (("#8a93a3", "#5d6776"), ("#1f3fa8", "#6f8ff7"), ("#8a1c3c", "#e8506a"), ("#c3c9d3", "#454d5a")),
    "gathered": ("#5b7be0", "#3f5fd0"),
    "summed": ("#d2607f", "#b03a57"),
    "idle": ("#e3e6eb", "#2c323c"),
    "workspace": ("#d97706", "#fbbf5a"),
    "activations": (("#0f9b78", "#4fd1a5"), ("#66c2aa", "#2a8f72")),
}


class UnitName(NamedTuple):
    """A unit's number and the text for its layers."""

    number: int
    layers: str


class Sample(NamedTuple):
    """Bytes in use from `second` of the step on: weights in the pool of gathered units, sums in the pool of gradients,
    saved activations by unit, and the workspace of the instruction that runs."""

    second: float
    gathered: int
    summed: int
    saved: tuple[int, ...]
    workspace: int

    @property
    def activations(self) -> int:
        return sum(self.saved) + self.workspace


class MemoryCurve(NamedTuple):
    """The memory of a pipeline rank: what it holds throughout, by name; the bytes of its `pools`, which stay allocated
    whether in use or not; its units; and the samples of a step."""

    pp: int
    fixed: dict[str, int]
    pools: int
    units: list[UnitName]
    samples: list[Sample]

    @property
    def peak(self) -> int:
        return sum(self.fixed.values()) + self.pools + max(sample.activations for sample in self.samples)


def memory_page(curves: Sequence[MemoryCurve], *, title: str, facts: dict[str, str], available: int) -> str:
    """The page, with a line at the `available` bytes. Raises PentadError if there is no curve."""
    if not curves:
        raise PentadError("memory_page has no curve: expected at least one")
    data = {"available": available, "colours": COLOURS, "ranks": [_rank(curve) for curve in curves]}
    styles, scripts = ("page.css", "memory/memory.css"), ("memory/memory.js",)
    return html_page("memory/memory.html", data, title=title, facts=facts, styles=styles, scripts=scripts)


def _rank(curve: MemoryCurve) -> dict[str, Any]:
    """Times in microseconds, sizes in KiB."""
    return {
        "pp": curve.pp,
        "peak": _kib(curve.peak),
        "fixed": {name: _kib(size) for name, size in curve.fixed.items()},
        "pools": _kib(curve.pools),
        "units": [unit.layers for unit in curve.units],
        "time": [round(sample.second * 1e6) for sample in curve.samples],
        "gathered": [_kib(sample.gathered) for sample in curve.samples],
        "summed": [_kib(sample.summed) for sample in curve.samples],
        "saved": [[_kib(size) for size in sample.saved] for sample in curve.samples],
        "workspace": [_kib(sample.workspace) for sample in curve.samples],
    }


def _kib(size: int) -> int:
    return -(-size // 1024)
