"""memory.offload_fraction: auto. Chooses which saved activations stay on the device, which go to the host, and which
are recomputed: the three tiers of MEMO (arXiv 2407.12117).

Copies that the schedule hides are free; further copies and recomputation cost seconds. For a rank that lacks memory,
the cheapest mixture is a linear program with one constraint, the bytes to free, and a bound for every tier: a
continuous knapsack. All ranks recompute the same number of layers, or with memory.recompute_fraction auto the same
share of rows in all layers; each offloads as much as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import ON_HOST, States, costs_of, pipeline_memories, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, HostMemory, ranks_of_host
from pentad.orchestrator.planning.layout import row_fraction
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.copy_slack import hidden_share
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.check import check

Maker = Callable[..., Plan]  # `make_plan` of a configuration, with `units` and `fractions`
# How often, and by how much, a fraction is raised because memory is not quite linear in it: tensors are cut.
RAISES, RAISED = 8, 0.02
# Units of compute that a copy may overlap, tried in a pipeline, where runs of forwards are followed by runs of
# backwards.
PREFETCHES = (1, 2, 4, 8)
NO_COST = 1.001  # times the step without copies: counts as free
ROW_STEPS = 32  # steps in which memory.recompute_fraction auto divides the rows


class Tier(NamedTuple):
    """All of the tier frees `gain` bytes and takes `seconds`; at most the share `limit` of it is available."""

    gain: float
    seconds: float
    limit: float


def cheapest(need: float, tiers: Sequence[Tier]) -> list[float]:
    """The shares of the tiers that free `need` bytes in the fewest seconds; all that is available if that is not
    enough.

    One constraint and bounds: the optimum takes the tiers in order of seconds a byte (Dantzig, 1957).
    """
    shares = [0.0] * len(tiers)
    for index in sorted(range(len(tiers)), key=lambda index: tiers[index].seconds / max(tiers[index].gain, 1.0)):
        tier = tiers[index]
        if tier.gain > 0 and need > 0:
            shares[index] = min(tier.limit, need / tier.gain)
            need -= shares[index] * tier.gain
    return shares


@dataclass(frozen=True, eq=False)
class _Tried:
    """A plan to compare, never run. If `alike` is set, it has the same program, and so the same state and events."""

    plan: Plan
    alike: _Tried | None = None

    @cached_property
    def state(self) -> States:
        return {} if self.alike is None else self.alike.state

    @cached_property
    def events(self) -> Events:
        return acyclic_events(self.plan.program) if self.alike is None else self.alike.events

    @cached_property
    def memory(self) -> list[dict[str, int]]:
        """Bytes by kind, for each pipeline rank."""
        return pipeline_memories(self.plan, self.state)

    @cached_property
    def needed(self) -> list[int]:
        return [each["total"] for each in self.memory]

    @cached_property
    def seconds(self) -> float:
        return simulated_seconds(self.plan, self.events)

    def fits(self, device: DeviceMemory) -> bool:
        return max(self.needed) <= device.bytes


def choose_tiers(
    config: RunConfig, device: DeviceMemory, host: HostMemory | None, make: Maker, *, proved: bool
) -> Plan:
    """The plan with the least simulated time, among those that fit with the least recomputation and offloading for each
    of PREFETCHES; if none fits, one with the most of both. If `proved`, only the chosen plan is proved: `make` proves
    none.

    Without memory.recompute nothing recomputes; with memory.recompute_layers that many layers do. Raises PentadError if
    something must be offloaded to a host whose memory is unknown (None).
    """
    found = _chosen(config, device, host, make)
    for program in found.trained_programs if proved else ():
        check(program, replicas=config.mesh.replicas, zero=found.zero)
    return found


def _chosen(config: RunConfig, device: DeviceMemory, host: HostMemory | None, make: Maker) -> Plan:
    plain = _Tried(make(_with(config, 0.0, 0.0)))
    if not config.memory.recompute_layers and plain.fits(device):
        return plain.plan
    if host is None:
        where = "as this machine's memory says nothing about the hosts of other GPUs"
        raise PentadError(f"memory.offload_fraction is auto: expected memory.host_gib besides, {where}")
    given = config.memory.offload_prefetch
    best, *others = (given,) if given or config.mesh.pp == 1 else PREFETCHES
    given_to_all = device, host, make, dict[Hashable, _Tried]()
    found = _with_prefetch(config, best, *given_to_all)
    for prefetch in others:
        if found.fits(device) and found.seconds <= NO_COST * plain.seconds:
            break
        other = _with_prefetch(config, prefetch, *given_to_all)
        if other.fits(device) and (not found.fits(device) or other.seconds < found.seconds):
            found = other
    return found.plan


def _with_prefetch(
    config: RunConfig,
    prefetch: int | None,
    device: DeviceMemory,
    host: HostMemory,
    make: Maker,
    known: dict[Hashable, _Tried],
) -> _Tried:
    """The plan with the least recomputation and offloading that fits; if none fits, with the most of both."""
    memory = config.memory.model_copy(update={"offload_prefetch": prefetch})
    search = _Search(config.model_copy(update={"memory": memory}), device, host, make, known)
    for step in range(search.first_step(), search.steps + 1):
        if (found := search.plan_with(step)) is not None:
            return found if config.memory.recompute_layers else search.faster(found, step)
        if config.memory.recompute_layers:
            break
    return search.all_of_both()


class _Search:
    """Tries plans with different fractions and different recomputation, of 0 to `steps` layers of each stage, or with
    memory.recompute_fraction auto parts of the rows. `most` does the most of both."""

    def __init__(
        self, config: RunConfig, device: DeviceMemory, host: HostMemory, make: Maker, known: dict[Hashable, _Tried]
    ) -> None:
        self.config, self.device, self.host, self.make, self.known = config, device, host, make, known
        self.most = _Tried(make(_with(config, None, 1.0)))
        program = self.most.plan.program
        self.layers, self.units = self.most.plan.layers, program.units or (1,) * program.stages
        self.steps = ROW_STEPS if config.memory.recompute_fraction == "auto" else largest_stage(self.most.plan)
        if config.memory.recompute == "none":
            self.steps = 0
        self.plan = cache(self._plan)

    def _plan(self, step: int | None, fraction: float, fractions: tuple[float, ...] = ()) -> _Tried:
        """`step` None: recomputes as much as configured. Plans share a program if the same layers recompute, and the
        same units offload or none do."""
        config = _with(self.config, None if step is None else step / max(1, self.steps), fraction, self.steps)
        shares, section = fractions or config.memory.fractions(self.layers), config.memory
        # without offloading, a plan may use CUDA graphs if they fit
        own = section.offload_prefetch if any(shares) else section.recompute_fraction
        key = section.recompute, section.recompute_layers, tuple(map(bool, shares)), own
        if (alike := self.known.get(key)) is None:
            self.known[key] = _Tried(self.make(config, units=self.units, fractions=fractions or None))
            return self.known[key]
        plan = replace(
            alike.plan,
            offload=shares,
            recompute_fraction=row_fraction(config),
            offload_prefetch=section.offload_prefetch or 1,
        )
        return _Tried(with_slots(plan), alike)

    def first_step(self) -> int:
        """The linear program's recomputation, as if tensors could be cut anywhere, rounded up to a step."""
        if self.config.memory.recompute_layers or not self.steps:
            return self.config.memory.recompute_layers or 0
        none, offloaded, recomputed = self.plan(0, 0.0), self.plan(0, 1.0), self.plan(self.steps, 0.0)
        caps, shares = self.caps(offloaded, partial(self.plan, 0, 0.5)), list[float]()
        hidden = hidden_share(offloaded.plan.program, costs_of(offloaded.plan))
        for rank, total in enumerate(none.needed):
            gains = [total - other.needed[rank] for other in (offloaded, recomputed)]
            free = min(hidden[rank], caps[rank])
            # only what is copied beyond the free part lengthens the step
            copies = (offloaded.seconds - none.seconds) / (1 - free) if free < 1 else 0.0
            tiers = (
                Tier(gains[0], 0.0, free),
                Tier(gains[0], copies, caps[rank] - free),
                Tier(gains[1], recomputed.seconds - none.seconds, 1.0),
            )
            shares.append(cheapest(total - self.device.bytes, tiers)[2])
        return math.ceil(max(shares) * self.steps - 1e-9)

    def caps(self, offloaded: _Tried, halved: Callable[[], _Tried]) -> list[float]:
        """By pipeline rank, the share that the host has memory for, from plans that offload everything and half. Some
        tensors are never cut, so that part of the bytes moves at any share."""
        moved = [each["host"] for each in offloaded.memory]
        room = self.host.bytes / ranks_of_host(offloaded.plan)
        spare = [room - sum(each[kind] for kind in ON_HOST if kind != "host") for each in offloaded.memory]
        if all(size <= free for size, free in zip(moved, spare, strict=True)):
            return [1.0] * len(moved)
        found = list[float]()
        for half, size, free in zip(halved().memory, moved, spare, strict=True):
            whole = 2 * half["host"] - size
            share = (free - whole) / max(1, size - whole)
            # rounded down: slots are aligned, and parts of tensors do not add up exactly to the whole
            found.append(math.floor(1000 * min(1.0, max(0.0, share))) / 1000)
        return found

    def plan_with(self, step: int) -> _Tried | None:
        """The plan with the smallest fractions at which every rank fits with so much recomputation; None if there is
        none."""
        none, offloaded = self.plan(step, 0.0), self.plan(step, 1.0)
        caps, shares = self.caps(offloaded, partial(self.plan, step, 0.5)), list[float]()
        for cap, total, least in zip(caps, none.needed, offloaded.needed, strict=True):
            shares += cheapest(total - self.device.bytes, [Tier(total - least, 0.0, cap)])
        for _ in range(RAISES):
            tried = self.plan(step, 1.0, self.fractions(shares))
            lacking = [total > self.device.bytes for total in tried.needed]
            if not any(lacking):
                return tried
            if any(lacks and share >= cap for lacks, share, cap in zip(lacking, shares, caps, strict=True)):
                return None
            raised = zip(shares, caps, lacking, strict=True)
            shares = [min(cap, share + RAISED * lacks) for share, cap, lacks in raised]
        return None

    def faster(self, found: _Tried, step: int) -> _Tried:
        """The plan that fits at this step, or a faster one from an earlier step: a pipeline has slack for copies that
        miss their deadlines, which `first_step` does not count."""
        for earlier in range(step - 1, 0, -1):
            other = self.plan_with(earlier)
            if other is None or other.seconds >= found.seconds:
                break
            found = other
        without = self.plan_with(0) if step else None
        return found if without is None or without.seconds >= found.seconds else without

    def all_of_both(self) -> _Tried:
        """The plan with the most of both, within the host's memory."""
        caps = self.caps(self.most, partial(self.plan, None, 0.5))
        return self.plan(None, 1.0, self.fractions(caps))

    def fractions(self, shares: Sequence[float]) -> tuple[float, ...]:
        """For each unit, the largest share among the ranks that hold it."""
        found = [0.0] * len(self.layers)
        for share, held in zip(shares, self.most.plan.program.placement, strict=True):
            for unit in held:
                found[unit] = max(found[unit], share) if self.layers[unit].numbers else 0.0
        return tuple(round(each, 4) for each in found)


def largest_stage(plan: Plan) -> int:
    """Number of layers in the largest stage of a pipeline."""
    counts = [0] * (1 + plan.program.stage_of[-1])
    for unit, layers in enumerate(plan.layers):
        counts[plan.program.stage_of[unit]] += len(layers.numbers)
    return max(counts)


def _with(config: RunConfig, recomputed: float | None, fraction: float, layers: int = 0) -> RunConfig:
    """The configuration with this share recomputed (None: as configured), of the rows or of `layers` layers of each
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
