"""What a GPU did in a profiled step, by kinds of kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pentad.schedules.simulate.step_profile import KERNEL, ProfileEvent

# A kernel is of the first kind with a part of its name; the rest works on rows: norms, activations, RoPE, sums.
PARTS = {
    "copies": ("Memcpy", "Memset"),
    "collectives": ("nccl",),
    "attention": ("sdpa", "flash", "fmha", "_attend", "_keys_and_values", "_queries", "_row_terms"),
    "products": ("gemm", "nvjet", "cutlass", "_grouped", "_accumulate"),
    "optimizer": ("_update", "_step"),
}
REST = "rows"
COMPUTE = ("attention", "products", "optimizer", REST)


def kind_of(name: str) -> str:
    return next((kind for kind, parts in PARTS.items() if any(part in name for part in parts)), REST)


def step_kernels(events: Iterable[ProfileEvent]) -> dict[str, float]:
    """Milliseconds of the kernels of each kind, of the step from the first kernel's start to the last one's end, and of
    the time in it without a kernel that computes. Kernels of several streams may overlap. Empty without kernels."""
    kernels = sorted((event for event in events if event.kind == KERNEL), key=lambda event: event.start)
    if not kernels:
        return {}
    found = dict.fromkeys([*PARTS, REST], 0)
    idle, until = 0, kernels[0].start
    for event in kernels:
        kind = kind_of(event.name)
        found[kind] += event.nanoseconds
        if kind in COMPUTE:
            idle += max(0, event.start - until)
            until = max(until, event.end)
    end = max(event.end for event in kernels)
    found |= {"step": end - kernels[0].start, "no compute": idle + max(0, end - until)}
    return {kind: round(nanoseconds / 1e6, 1) for kind, nanoseconds in found.items()}


def longest_kernels(events: Iterable[ProfileEvent], most: int = 12) -> dict[str, float]:
    """Milliseconds of the kernels that took longest, each summed over its launches."""
    found = defaultdict[str, int](int)
    for event in events:
        if event.kind == KERNEL:
            found[event.name] += event.nanoseconds
    longest = sorted(found, key=lambda name: -found[name])[:most]
    return {name: round(found[name] / 1e6, 1) for name in longest}
