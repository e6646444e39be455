"""A run's measured steps beside the same steps simulated, as an HTML page and as an SVG figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pentad.schedules.draw.html import timeline_page
from pentad.schedules.draw.svg import svg_comparison
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters

if TYPE_CHECKING:
    from pentad.orchestrator.config.config import RunConfig  # slow to import, for a process that draws


class DrawnRun(NamedTuple):
    """What drawings say about a run; `model` is a description."""

    name: str
    mesh: Mesh
    program: Program
    batch: BatchSpec
    model: str

    @staticmethod
    def of_plan(plan: Plan) -> DrawnRun:
        return DrawnRun(plan.name, plan.mesh, plan.program, plan.batch, _size(plan.model))

    @staticmethod
    def of_config(config: RunConfig, program: Program) -> DrawnRun:
        """The drawing of a run with this program. A custom model is only named: to measure it would execute the user's
        file."""
        from pentad.orchestrator.planning.layout import batch_spec

        batch, custom = batch_spec(config), config.model.custom
        if program.microbatches in batch.rampup_microbatches:
            batch = batch.with_microbatches(program.microbatches)
        model = _size(config.model.spec) if custom is None else custom
        return DrawnRun(config.run.name, config.mesh.mesh, program, batch, model)


def _size(model: ModelSpec) -> str:
    return f"{num_parameters(model):,} parameters, {model.layers} layers"


def simulate_steps(plan: Plan | DrawnRun, measured: Timeline, costs: Costs) -> Timeline:
    """Every step of `measured` simulated at the costs measured in that step, over the ranks of the mesh.

    `costs` are for steps that lack the F, B or W of some stage.
    """
    spans: list[Span] = []
    for step in measured.steps:
        own = read_costs(plan.program, measured.of_step(step)) or costs
        spans += to_mesh_ranks(simulate(plan.program, own, step=step), plan.mesh).spans
    return Timeline("simulated", tuple(spans))


def comparison_page(run: DrawnRun, measured: Timeline, simulated: Timeline, figure: str = "") -> str:
    """The HTML page of all measured steps; `simulated` is of `simulate_steps`, `figure` an SVG text below them."""
    program = run.program
    facts = {
        "schedule": f"{program.name}, {program.microbatches} microbatches",
        "mesh": str(run.mesh),
        "model": run.model,
        "batch": f"{run.batch.global_batch_size} x {run.batch.sequence_length} tokens",
        "program": program.hash[:12],
    }
    return timeline_page([measured, simulated], title=f"pentad run {run.name}", facts=facts, figure=figure)


def comparison_svg(plan: Plan | DrawnRun, measured: Timeline, simulated: Timeline) -> str:
    """The SVG figure of one measured step; `simulated` is the same step of `simulate_steps`."""
    title = f"{plan.name}: {plan.program.name}, {plan.program.microbatches} microbatches, {plan.mesh}"
    return svg_comparison(measured, simulated, title=title)
