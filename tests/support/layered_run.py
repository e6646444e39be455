"""A run whose tensor ranks exchange rows inside layers, which takes longer than planned."""

from __future__ import annotations

from typing import NamedTuple

from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.comparison import DrawnRun, comparison_page, simulate_steps
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks
from pentad.schedules.spec.plan import Plan

SLOWDOWN = 1.25
WORDS = ("batch.global_batch_size=32", "cluster.rates=builtin", "cluster.gpu=NVIDIA H200")


class LayeredRun(NamedTuple):
    """`simulated` is at the costs of the one measured step."""

    plan: Plan
    measured: Timeline
    simulated: Timeline

    def page(self, *, messages: bool = True) -> str:
        """The page with the plan's messages inside layers, or as if there were none."""
        run = DrawnRun.of_plan(self.plan)
        return comparison_page(run if messages else run._replace(messages=()), self.measured, self.simulated)


def layered_run(*words: str, job: str = "llama-8b") -> LayeredRun:
    """tp2 x pp2 on H200s, unless `words` say otherwise."""
    defaults = (*WORDS, "mesh.tp=2", "mesh.pp=2", "mesh.dp=1", "schedule.microbatches=8")
    plan = make_plan(load(ROOT / "deploy" / "jobs" / f"{job}.yaml", [*defaults, *words]), "cuda", proved=False)
    planned = to_mesh_ranks(simulate(plan.program, costs_of(plan), step=3), plan.mesh).spans
    spans = (span._replace(start=SLOWDOWN * span.start, end=SLOWDOWN * span.end) for span in planned)
    measured = Timeline("measured", tuple(spans))
    return LayeredRun(plan, measured, simulate_steps(plan, measured, costs_of(plan)))
