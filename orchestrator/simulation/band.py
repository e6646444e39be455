"""The range of 5 to 95 % of a plan's step times, with links that operations share and with random deviations."""

from __future__ import annotations

from typing import Any, NamedTuple

from pentad.orchestrator.planning.estimate import costs_of, mfu
from pentad.orchestrator.planning.formatting import format_percent
from pentad.orchestrator.simulation.link_shares import link_shares
from pentad.schedules.ir.columns import Array
from pentad.schedules.simulate.costs import instruction_seconds
from pentad.schedules.simulate.deviations import Deviations, StepBand, band_of, replica_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.shared_links import shared_seconds
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.spec.plan import Plan

# Measured on two H200s: deviations of 0.015 to 0.023 between instructions, and of 0.005 to 0.008 for a rank from step
# to step (tests/bench/results/jitter-2xh200.json); products on two H100s differed by 1.7 % (calibration-2xh100.json and
# -h100.json).
DEVIATIONS = Deviations(instruction=0.02, rank=0.01)


class PlanBand(NamedTuple):
    """Seconds of a step: `nominal` at its costs, `shared` with shared links, and `band` with deviations as well, over
    `draws` draws; and the MFU of the latter (None: on CPUs)."""

    nominal: float
    shared: float
    band: StepBand
    mfu: StepBand | None
    draws: int

    @property
    def sentence(self) -> str:
        """'5, 50 and 95 % of steps take at most 4.073, 4.101 and 4.148 s (45.3 %, 44.9 % and 44.4 % MFU): ...'"""
        used = "" if self.mfu is None else f" ({_listed([format_percent(each) for each in self.mfu])} MFU)"
        links, rest = (self.shared - self.nominal) / self.band.middle, 1 - self.shared / self.band.middle
        causes = f"shared links are {format_percent(links)} of a step, deviations {format_percent(rest)}"
        seconds = _listed([f"{each:.4g}" for each in self.band])
        return f"5, 50 and 95 % of steps take at most {seconds} s{used}: {causes} ({self.draws} draws)"

    def facts(self) -> dict[str, Any]:
        return {
            "draws": self.draws,
            "shared_links_seconds": self.shared,
            "step_seconds": self.band._asdict(),
            "mfu": None if self.mfu is None else self.mfu._asdict(),
            "deviations": {"instruction": DEVIATIONS.instruction, "rank": DEVIATIONS.rank},
        }


def plan_band(plan: Plan, draws: int, events: Events | None = None) -> PlanBand:
    """The band of at least two draws, from the plan's seed. `events` are those of its program, if already known."""
    program, costs, mesh = plan.program, costs_of(plan), plan.mesh
    events = events or acyclic_events(program)
    seconds = shared_seconds(program, events, costs, link_shares(plan, costs))

    def step(rows: Array) -> float:
        times = event_times(program, events, costs, rows)
        return float(times.ends.max() - times.starts.min())

    together = mesh.tp * mesh.cp * mesh.ep
    steps = replica_seconds(program, events, seconds, DEVIATIONS, together, draws, plan.seed)
    band = band_of(steps, mesh.dp)
    used = [mfu(plan.batch.tokens / each, plan, plan.gpu) if plan.device == "cuda" else None for each in band]
    shares = StepBand(*(each for each in used if each is not None)) if None not in used else None
    return PlanBand(step(instruction_seconds(program, costs)), step(seconds), band, shares, draws)


def _listed(texts: list[str]) -> str:
    return f"{texts[0]}, {texts[1]} and {texts[2]}"
