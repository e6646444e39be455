"""What a step of a plan takes in 5 to 95 % of steps: with links that operations share, and drawn deviations."""

from __future__ import annotations

from typing import NamedTuple

from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.simulation.link_shares import link_shares
from pentad.schedules.simulate.costs import instruction_seconds
from pentad.schedules.simulate.deviations import Deviations, StepBand, band_of, replica_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.shared_links import shared_seconds
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.spec.plan import Plan

DEVIATIONS = Deviations(instruction=0.02, rank=0.01)
DRAWS = 32


class PlanBand(NamedTuple):
    """Seconds of a step as it costs, with shared links, and with deviations as well, in so many draws."""

    nominal: float
    shared: float
    band: StepBand
    draws: int


def plan_band(plan: Plan, draws: int = DRAWS, events: Events | None = None) -> PlanBand:
    """A step of a plan. `events` are those of its program, if they are known already."""
    program, costs, mesh = plan.program, costs_of(plan), plan.mesh
    events = events or acyclic_events(program)
    seconds = shared_seconds(program, events, costs, link_shares(plan, costs))

    def step(rows: object) -> float:
        times = event_times(program, events, costs, rows)
        return float(times.ends.max() - times.starts.min())

    together = mesh.tp * mesh.cp * mesh.ep
    steps = replica_seconds(program, events, seconds, DEVIATIONS, together, draws)
    return PlanBand(step(instruction_seconds(program, costs)), step(seconds), band_of(steps, mesh.dp), draws)
