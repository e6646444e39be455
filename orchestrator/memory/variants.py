"""Plans of one configuration that differ only in which layers recompute and how much they offload, from as few compiled
programs as possible.

In a shared program all layers recompute. In a plan where some do not, their RECOMPUTE takes no time and no memory.
Programs that offload are the same for any share. So only bytes and seconds are summed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import States, fullest_bytes, memories, memory, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of_ranks
from pentad.orchestrator.planning.layout import row_fraction, unit_placement
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.passes.recompute import config_text, config_value
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.spec.plan import Plan

Words = tuple[str, ...]
AUTO = "auto"


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A plan, and what it shares with other plans of its program."""

    plan: Plan
    state: States

    @cached_property
    def events(self) -> Events:
        return acyclic_events(self.plan.program)


class Variants:
    """Variants of a configuration, for ranks with this memory: with other values for memory.recompute and its layers,
    and for offload_fraction if a share is given. Their programs are not proven: they are only for comparison."""

    def __init__(self, config: RunConfig, device: str, room: DeviceMemory) -> None:
        self.config, self.device, self.room = config, device, room
        self._configs = dict[str, RunConfig]()
        self._shared = dict[tuple[str, int | None, bool], _Compiled]()
        self._by_program = dict[int, _Compiled]()  # keyed by id of the program, which the value keeps alive

    @property
    def own(self) -> Plan:
        """The plan of the configuration, with a program of its own."""
        return self._compiled(self.config).plan

    def words(self, mode: str, layers: int | None = None) -> Words:
        """Overrides with which this many layers of each stage (None: all) recompute in a plan's `mode`. A mode other
        than the configuration's recomputes all rows."""
        found = (
            f"memory.recompute={config_text(mode)}",
            f"memory.recompute_layers={'null' if layers is None else layers}",
        )
        return (*found, "memory.recompute_fraction=1.0") if self._needs_all_rows(mode) else found

    def _needs_all_rows(self, mode: str) -> bool:
        return mode != self.config.memory.mode and self.config.memory.recompute_fraction != 1

    @property
    def as_it_is(self) -> tuple[Words, Plan]:
        """The plan with unchanged recomputation, and its overrides; with `auto` nothing recomputes."""
        section = self.config.memory
        if section.recompute == AUTO:
            return ("memory.recompute=none",), self.plan("none")
        return (), self.plan(section.mode, section.recompute_layers)

    def plan(self, mode: str, layers: int | None = None, share: float | None = None) -> Plan:
        """The plan in which this many layers of each stage (None: all) recompute. Raises PentadError for a mode that
        the model or other keys do not allow."""
        config = self._config(mode, layers, share)
        if (shared := self._shared_with(config)) is None:
            return self._compiled(config).plan
        section, units = config.memory, shared.program.units or (1,) * shared.program.stages
        modes = section.modes(units, shared.layers)
        if not modes and shared.recompute:  # without modes, RECOMPUTEs would cost as much as forwards
            modes = ("none",) * len(shared.layers)
        return with_slots(
            replace(
                shared,
                recompute=modes,
                offload=section.fractions(shared.layers),
                recompute_fraction=row_fraction(config),
            )
        )

    def is_exact(self, plan: Plan) -> bool:
        """Whether one of these plans is exactly what `make_plan` makes, with no RECOMPUTE that takes no time."""
        return plan.recompute == self._by_program[id(plan.program)].plan.recompute

    def fit(self, plan: Plan) -> Fit:
        """The fit of one of these plans."""
        return fit_of_ranks(memories(plan, self._by_program[id(plan.program)].state), self.room)

    def fits(self, plan: Plan) -> bool:
        """Whether one of these plans fits; quick if its first rank does not."""
        first = memory(plan, 0, self._by_program[id(plan.program)].state)["total"]
        return (self.room.is_shared or first <= self.room.bytes) and self.fit(plan).ok

    def needed(self, plan: Plan) -> int:
        """`fullest_bytes` of one of these plans, or those of the first rank found that does not fit."""
        return fullest_bytes(plan, self.room.bytes, self._by_program[id(plan.program)].state)

    def seconds(self, plan: Plan) -> float:
        """The seconds of a simulated step of one of these plans."""
        return simulated_seconds(plan, self._by_program[id(plan.program)].events)

    def _config(self, mode: str, layers: int | None, share: float | None) -> RunConfig:
        if mode not in self._configs:
            values = {"recompute": config_value(mode), "recompute_layers": None}
            rows = {"recompute_fraction": 1.0} if self._needs_all_rows(mode) else {}
            self._configs[mode] = load(self.config, sections={"memory": {**values, **rows}})
        config = self._configs[mode]
        section = config.memory
        changed = {"recompute_layers": layers, "offload_fraction": section.offload_fraction if share is None else share}
        return config.model_copy(update={"memory": section.model_copy(update=changed)})

    def _shared_with(self, config: RunConfig) -> Plan | None:
        """The plan with a configuration's program, up to RECOMPUTEs; None if there is none. What is in host memory
        depends on what recomputes, and units on whether anything does."""
        section = config.memory
        if section.offload_fraction == AUTO or section.max_resident_microbatches is not None:
            return None
        mode, layers, offloads = section.mode, section.recompute_layers, section.offload_fraction != 0
        if not offloads:
            if mode == "none" and not self._none_has_same_units:
                return None
            mode, layers = "full", None
        key = mode, layers, offloads
        if key not in self._shared:
            self._shared[key] = self._compiled(self._config(mode, layers, float(offloads)))
        return self._shared[key].plan

    def _compiled(self, config: RunConfig) -> _Compiled:
        plan = make_plan(config, self.device, memory=self.room, proved=False)
        found = _Compiled(plan, {})
        self._by_program[id(plan.program)] = found
        return found

    @cached_property
    def _none_has_same_units(self) -> bool:
        none, full = (self._config(mode, None, None) for mode in ("none", "full"))
        return unit_placement(none, self.device) == unit_placement(full, self.device)
