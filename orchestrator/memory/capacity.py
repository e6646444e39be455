"""data.capacity_factor: auto. The most tokens of a microbatch that a rank of data-aware groups can hold: with more
room, documents need fewer ranks and balance better.

The capacity does not change programs, so only bytes are counted anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.estimate import fullest_bytes
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of, fits_host
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.layout import grouped
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

STEPS = 100  # factors are chosen in hundredths of the even share
USEFUL = 3.0  # more room shortens no simulated step by 0.5 % (docs/data.md)
OFFLOADED = (0.25, 0.5, 0.75, 1.0)  # tried to see what more offloading would gain


Limit = Literal["device", "host", "useful"]


class Capacity(NamedTuple):
    """The chosen `factor`, its `tokens`, and what limits it: memory of the 'device', which a larger one would exceed
    with `needed` bytes, memory of the 'host', or that more is not 'useful'. `offloaded`: the factors that larger values
    of memory.offload_fraction would allow."""

    factor: float
    tokens: int
    limit: Limit
    needed: int
    offloaded: dict[float, float]

    @property
    def facts(self) -> dict[str, Any]:
        """What `pentad plan --json` prints."""
        return {**self._asdict(), "offloaded": {f"{share:g}": factor for share, factor in self.offloaded.items()}}


def fitting_factor(config: RunConfig, plan: Plan, room: DeviceMemory) -> float:
    """The largest factor up to USEFUL with which a configuration's plan fits on devices with this memory and on their
    hosts; 1 if none fits."""
    low, high = STEPS, int(USEFUL * STEPS) + 1  # `low` is taken to fit, `high` not to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(config, plan, room, middle / STEPS) else (low, middle)
    return low / STEPS


def capacity_of(config: RunConfig, plan: Plan, room: DeviceMemory, factor: float) -> Capacity:
    """Why a plan's `fitting_factor` is no larger, and what would allow more."""
    wider = with_capacity(plan, factor + 1 / STEPS)
    needed, is_enough = fit_of(wider, room).needed, factor >= USEFUL
    limit: Limit = "useful" if is_enough else "device" if needed > room.bytes else "host"
    given = config.memory.offload_fraction
    shares = () if is_enough or given == "auto" else (share for share in OFFLOADED if share > given)
    offloaded = {share: _with_offloading(config, plan.device, room, share) for share in shares}
    return Capacity(factor, with_capacity(plan, factor).batch.capacity, limit, needed, offloaded)


def with_capacity(plan: Plan, factor: float) -> Plan:
    """The plan of the configuration with this factor."""
    return with_slots(replace(plan, batch=grouped(plan, factor)))


def capacity_sentence(found: Capacity, room: DeviceMemory) -> str:
    """'a rank holds at most 47,186 tokens of a microbatch, 1.44 times its even share: with 1.45 it would need ...'"""
    more = f"with {found.factor + 1 / STEPS:.2f}"
    why = {
        "device": f"{more} ranks would need {format_bytes(found.needed)} {room.where}, of {format_bytes(room.bytes)}",
        "host": f"{more} they would keep more on their host than it has",
        "useful": "more would hardly balance documents better",
    }[found.limit]
    text = f"a rank holds up to {found.tokens:,} tokens of a microbatch, {found.factor:.2f} times its even share: {why}"
    gains = [f"{factor:.2f} with {share:g}" for share, factor in found.offloaded.items()]
    return f"{text}; by memory.offload_fraction: {', '.join(gains)}" if gains else text


def _with_offloading(config: RunConfig, device: str, room: DeviceMemory, share: float) -> float:
    other = with_words(config, [f"memory.offload_fraction={share}"])
    return fitting_factor(other, make_plan(other, device, proved=False), room)


def _fits(config: RunConfig, plan: Plan, room: DeviceMemory, factor: float) -> bool:
    wider = with_capacity(plan, factor)
    if not room.is_shared and fullest_bytes(wider, room.bytes) > room.bytes:
        return False
    return fit_of(wider, room).ok and fits_host(config, wider)
