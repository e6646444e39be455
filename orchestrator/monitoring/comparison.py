"""A run's measured steps beside the same steps simulated, as an HTML page and as an SVG figure."""

from __future__ import annotations

from pentad.orchestrator.planning.estimate import read_costs
from pentad.orchestrator.planning.planning import to_mesh_ranks
from pentad.schedules.draw.html import timeline_page
from pentad.schedules.draw.svg import svg_comparison
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters


def simulate_steps(plan: Plan, measured: Timeline, costs: Costs) -> Timeline:
    """Every step of `measured` simulated at the costs measured in that step, over the ranks of the mesh.

    `costs` are for steps that lack the F, B or W of some stage.
    """
    spans: list[Span] = []
    for step in measured.steps:
        own = read_costs(plan.program, measured.of_step(step)) or costs
        spans += to_mesh_ranks(simulate(plan.program, own, step=step), plan.mesh).spans
    return Timeline("simulated", tuple(spans))


def comparison_page(plan: Plan, measured: Timeline, simulated: Timeline) -> str:
    """The HTML page of all measured steps; `simulated` is of `simulate_steps`."""
    program = plan.program
    facts = {
        "schedule": f"{program.name}, {program.microbatches} microbatches",
        "mesh": str(plan.mesh),
        "model": f"{num_parameters(plan.model):,} parameters, {plan.model.layers} layers",
        "batch": f"{plan.batch.global_batch_size} x {plan.batch.sequence_length} tokens",
        "program": program.hash[:12],
    }
    return timeline_page([measured, simulated], title=f"pentad run {plan.name}", facts=facts)


def comparison_svg(plan: Plan, measured: Timeline, simulated: Timeline) -> str:
    """The SVG figure of one measured step; `simulated` is the same step of `simulate_steps`."""
    title = f"{plan.name}: {plan.program.name}, {plan.program.microbatches} microbatches, {plan.mesh}"
    return svg_comparison(measured, simulated, title=title)
