"""memory.offload_fraction: auto. Which part of the saved activations stays on the device, which goes to the host, and
which is computed again: the three tiers of MEMO (arXiv 2407.12117).

Copies that the schedule hides cost nothing, copies beyond that and recomputation cost seconds. For a rank that lacks
memory the cheapest mixture is a linear program with one constraint, the bytes to free, and a bound for every tier: a
continuous knapsack. The ranks share one number of layers that recompute, or with memory.recompute_fraction auto one
share of the rows in all layers; how much each offloads is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import costs_of, memory, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, HostMemory, host_bytes, ranks_of_host
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.copy_slack import hidden_share
from pentad.schedules.spec.plan import Plan

Maker = Callable[..., Plan]  # `make_plan` of a configuration, with `units` and `fractions`
# How often, and by how much, a fraction is raised for what is not linear in it: tensors that are cut.
RAISES, RAISED = 8, 0.02
# Units that compute beside a copy, in a pipeline, where forwards in a row are followed by as many backwards.
PREFETCHES = (1, 2, 4, 8)
NO_COST = 1.001  # times the step without any copies
ROW_STEPS = 32  # parts of the rows, of which memory.recompute_fraction auto takes some


class Tier(NamedTuple):
    """`gain` are the bytes that all of it frees, in `seconds`; of which at most the share `limit` can be had."""

    gain: float
    seconds: float
    limit: float


def cheapest(need: float, tiers: Sequence[Tier]) -> list[float]:
    """The shares of the tiers that free `need` bytes in the fewest seconds; all that there is if that is not enough.

    One constraint and bounds: the optimum takes the tiers in the order of seconds a byte (Dantzig, 1957).
    """
    shares = [0.0] * len(tiers)
    for index in sorted(range(len(tiers)), key=lambda index: tiers[index].seconds / max(tiers[index].gain, 1.0)):
        tier = tiers[index]
        if tier.gain > 0 and need > 0:
            shares[index] = min(tier.limit, need / tier.gain)
            need -= shares[index] * tier.gain
    return shares


def choose_tiers(config: RunConfig, device: DeviceMemory, host: HostMemory | None, make: Maker) -> Plan:
    """The plan that fits in the least simulated time, of those with the least recomputation and offloading that fit
    with each of PREFETCHES; if none fits, with the most of both.

    Without memory.recompute nothing recomputes; with memory.recompute_layers that many layers do. Raises PentadError if
    something has to go to a host whose memory is unknown (None).
    """
    plain = make(_with(config, 0.0, 0.0))
    if not config.memory.recompute_layers and _lack(plain, device) <= 0:
        return plain
    if host is None:
        where = "as this machine's memory says nothing about the hosts of other GPUs"
        raise PentadError(f"memory.offload_fraction is auto: expected memory.host_gib besides, {where}")
    given = config.memory.offload_prefetch
    best, *others = (given,) if given or config.mesh.pp == 1 else PREFETCHES
    found = _with_prefetch(config, best, device, host, make)
    least, seconds = simulated_seconds(plain), simulated_seconds(found)
    for prefetch in others:
        if _lack(found, device) <= 0 and seconds <= NO_COST * least:
            break
        other = _with_prefetch(config, prefetch, device, host, make)
        if _lack(other, device) <= 0 and (_lack(found, device) > 0 or simulated_seconds(other) < seconds):
            found, seconds = other, simulated_seconds(other)
    return found


def _with_prefetch(
    config: RunConfig, prefetch: int | None, device: DeviceMemory, host: HostMemory, make: Maker
) -> Plan:
    """The plan with the least recomputation and offloading that fits; if none fits, with the most of both."""
    memory = config.memory.model_copy(update={"offload_prefetch": prefetch})
    config = config.model_copy(update={"memory": memory})
    most = make(_with(config, None, 1.0))
    search = _Search(config, device, host, make, most)
    first = search.first_step()
    for step in range(first, search.steps + 1):
        if (found := search.plan_with(step)) is not None:
            return found if config.memory.recompute_layers else search.faster(found, step)
        if config.memory.recompute_layers:
            break
    caps = search.caps(most, lambda: make(_with(config, None, 0.5)))
    return make(_with(config, None, 1.0), fractions=search.fractions(caps))


class _Search:
    """Tries plans that differ in their fractions and in what recomputes: this many of `steps`, which are layers of each
    stage, or with memory.recompute_fraction auto parts of the rows. `most` does most of both."""

    def __init__(self, config: RunConfig, device: DeviceMemory, host: HostMemory, make: Maker, most: Plan) -> None:
        self.config, self.device, self.host, self.make, self.most = config, device, host, make, most
        self.units = most.program.units or (1,) * most.program.stages
        self.steps = ROW_STEPS if config.memory.recompute_fraction == "auto" else largest_stage(most)
        if config.memory.recompute == "none":
            self.steps = 0

    def plan(self, step: int, fraction: float, **more: tuple[float, ...]) -> Plan:
        return self.make(_with(self.config, step / max(1, self.steps), fraction, self.steps), units=self.units, **more)

    def first_step(self) -> int:
        """The step of the solution of the linear program, as if tensors could be cut anywhere."""
        if self.config.memory.recompute_layers or not self.steps:
            return self.config.memory.recompute_layers or 0
        plans = none, offloaded, recomputed = self.plan(0, 0.0), self.plan(0, 1.0), self.plan(self.steps, 0.0)
        seconds, copied, computed = map(simulated_seconds, plans)
        caps, shares = self.caps(offloaded, lambda: self.plan(0, 0.5)), list[float]()
        hidden = hidden_share(offloaded.program, costs_of(offloaded))
        for rank, at in enumerate(_ranks(none)):
            need, total = _needed(none, at) - self.device.bytes, _needed(none, at)
            gains = [total - _needed(other, at) for other in (offloaded, recomputed)]
            free = min(hidden[rank], caps[rank])
            # the time of a step grows with what is copied beyond that
            copies = (copied - seconds) / (1 - free) if free < 1 else 0.0
            tiers = (
                Tier(gains[0], 0.0, free),
                Tier(gains[0], copies, caps[rank] - free),
                Tier(gains[1], computed - seconds, 1.0),
            )
            shares.append(cheapest(need, tiers)[2])
        return math.ceil(max(shares) * self.steps - 1e-9)

    def caps(self, offloaded: Plan, halved: Callable[[], Plan]) -> list[float]:
        """By pipeline rank: the share for which the host has memory, from plans that offload all and half. Not all
        tensors are cut, so that some of what is moved is moved with any share."""
        moved = [memory(offloaded, at)["host"] for at in _ranks(offloaded)]
        room = self.host.bytes / ranks_of_host(offloaded)
        spare = [room - host_bytes(offloaded, at) + size for at, size in zip(_ranks(offloaded), moved, strict=True)]
        if all(size <= free for size, free in zip(moved, spare, strict=True)):
            return [1.0] * len(moved)
        half, found = halved(), list[float]()
        for at, size, free in zip(_ranks(half), moved, spare, strict=True):
            whole = 2 * memory(half, at)["host"] - size
            share = (free - whole) / max(1, size - whole)
            # rounded down: slots are aligned, and sums of parts of tensors are not exactly those of all
            found.append(math.floor(1000 * min(1.0, max(0.0, share))) / 1000)
        return found

    def plan_with(self, step: int) -> Plan | None:
        """With the least fractions with which every rank fits if so much recomputes; None if there are none."""
        none, offloaded = self.plan(step, 0.0), self.plan(step, 1.0)
        caps, shares = self.caps(offloaded, lambda: self.plan(step, 0.5)), list[float]()
        for cap, at in zip(caps, _ranks(none), strict=True):
            gain = _needed(none, at) - _needed(offloaded, at)
            shares += cheapest(_needed(none, at) - self.device.bytes, [Tier(gain, 0.0, cap)])
        for _ in range(RAISES):
            plan = self.plan(step, 1.0, fractions=self.fractions(shares))
            lacking = [_needed(plan, at) > self.device.bytes for at in _ranks(plan)]
            if not any(lacking):
                return plan
            if any(lacks and share >= cap for lacks, share, cap in zip(lacking, shares, caps, strict=True)):
                return None
            raised = zip(shares, caps, lacking, strict=True)
            shares = [min(cap, share + RAISED * lacks) for share, cap, lacks in raised]
        return None

    def faster(self, found: Plan, step: int) -> Plan:
        """The plan that fits at this step, or one at an earlier step that takes less time: a pipeline has slack for
        copies that are later than their deadlines, which `first_step` does not count."""
        least = simulated_seconds(found)
        for earlier in range(step - 1, 0, -1):
            plan = self.plan_with(earlier)
            if plan is None or (seconds := simulated_seconds(plan)) >= least:
                break
            found, least = plan, seconds
        without = self.plan_with(0) if step else None
        return found if without is None or simulated_seconds(without) >= least else without

    def fractions(self, shares: Sequence[float]) -> tuple[float, ...]:
        """By unit: the largest share of the ranks that hold it."""
        found = [0.0] * len(self.most.layers)
        for share, held in zip(shares, self.most.program.placement, strict=True):
            for unit in held:
                found[unit] = max(found[unit], share) if self.most.layers[unit].numbers else 0.0
        return tuple(round(each, 4) for each in found)


def largest_stage(plan: Plan) -> int:
    """Layers of the largest stage of a pipeline."""
    counts = [0] * (1 + plan.program.stage_of[-1])
    for unit, layers in enumerate(plan.layers):
        counts[plan.program.stage_of[unit]] += len(layers.numbers)
    return max(counts)


def _with(config: RunConfig, recomputed: float | None, fraction: float, layers: int = 0) -> RunConfig:
    """In which this share recomputes (None: as much as configured), of the rows or of this many layers of each
    stage."""
    changed: dict[str, object] = {"offload_fraction": fraction}
    by_rows = config.memory.recompute_fraction == "auto"
    if recomputed == 0:
        changed |= {"recompute": "none", "recompute_layers": None, "recompute_fraction": 1.0}
    elif by_rows:
        changed["recompute_fraction"] = 1.0 if recomputed is None else recomputed
    elif recomputed is not None:
        changed["recompute_layers"] = round(recomputed * layers)
    return config.model_copy(update={"memory": config.memory.model_copy(update=changed)})


def _ranks(plan: Plan) -> tuple[int, ...]:
    """A rank of the mesh for each pipeline rank."""
    return plan.mesh.group(("pp",), 0)


def _needed(plan: Plan, rank: int) -> int:
    return memory(plan, rank)["total"]


def _lack(plan: Plan, device: DeviceMemory) -> int:
    return max(_needed(plan, rank) for rank in _ranks(plan)) - device.bytes
