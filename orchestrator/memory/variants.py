"""Plans of one configuration that differ only in what layers recompute, from one compiled program.

In that program all layers recompute. For a plan in which some do not, their RECOMPUTE takes no time and no memory, so
that only bytes and seconds have to be summed again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.estimate import memories, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, Fit, fit_of_ranks
from pentad.orchestrator.planning.layout import row_fraction, unit_placement
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.passes.recompute import config_text
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.spec.plan import Plan

Words = tuple[str, ...]


AUTO = "auto"


class Variants:
    """Of a configuration whose memory.recompute and its layers are replaced by others, on ranks with this memory."""

    def __init__(self, config: RunConfig, device: str, room: DeviceMemory) -> None:
        self.config, self.device, self.room = config, device, room
        self._configs = dict[str, RunConfig]()

    def words(self, mode: str, layers: int | None = None) -> Words:
        """Overrides with which so many layers of each stage (None: all) recompute, by such a mode of a plan: another
        one than that of the configuration recomputes all rows."""
        found = (
            f"memory.recompute={config_text(mode)}",
            f"memory.recompute_layers={'null' if layers is None else layers}",
        )
        section = self.config.memory
        is_other = mode != section.mode and section.recompute_fraction != 1
        return (*found, "memory.recompute_fraction=1.0") if is_other else found

    @property
    def as_it_is(self) -> tuple[Words, Plan]:
        """Without a change of what recomputes; for `auto` nothing does."""
        section = self.config.memory
        if section.recompute == AUTO:
            return ("memory.recompute=none",), self.plan("none")
        return (), self.plan(section.mode, section.recompute_layers)

    def plan(self, mode: str, layers: int | None = None) -> Plan:
        """In which so many layers of each stage (None: all) recompute. Raises PentadError for a mode that the model or
        other keys do not allow."""
        config = self._config(mode)
        if layers is not None:
            memory = config.memory.model_copy(update={"recompute_layers": layers})
            config = config.model_copy(update={"memory": memory})
        if not self._shares_program(config):
            return make_plan(config, self.device, memory=self.room)
        units = self._full.program.units or (1,) * self._full.program.stages
        modes = config.memory.modes(units, self._full.layers) or ("none",) * len(self._full.layers)
        # without modes, RECOMPUTEs would cost as much as forwards
        return replace(self._full, recompute=modes, recompute_fraction=row_fraction(config))

    def fit(self, plan: Plan) -> Fit:
        """Of one of these plans."""
        return fit_of_ranks(memories(plan, self._memories if plan.program is self._full.program else ()), self.room)

    def seconds(self, plan: Plan) -> float:
        """Of a simulated step of one of these plans."""
        return simulated_seconds(plan, self._events if plan.program is self._full.program else None)

    def _config(self, mode: str) -> RunConfig:
        if mode not in self._configs:
            self._configs[mode] = with_words(self.config, self.words(mode))
        return self._configs[mode]

    def _shares_program(self, config: RunConfig) -> bool:
        """Whether it has the program of the plan in which all layers recompute, but for its RECOMPUTEs: offloads depend
        on what is recomputed, and units on whether anything is."""
        section = config.memory
        if section.offload_fraction or section.max_resident_microbatches is not None:
            return False
        return section.recompute != "none" or self._none_has_same_units

    @cached_property
    def _none_has_same_units(self) -> bool:
        return unit_placement(self._config("none"), self.device) == unit_placement(self._config("full"), self.device)

    @cached_property
    def _full(self) -> Plan:
        return make_plan(self._config("full"), self.device, memory=self.room)

    @cached_property
    def _memories(self) -> list[dict[str, int]]:
        return memories(self._full)

    @cached_property
    def _events(self) -> Events:
        return acyclic_events(self._full.program)
