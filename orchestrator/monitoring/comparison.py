"""A run's measured steps beside simulations of the same steps, as an HTML page and as an SVG figure."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from pentad.orchestrator.memory.curve import planned_memory
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.simulation.layer_spans import planned_messages, with_layer_spans
from pentad.schedules.diagnosis.step_path import Piece, step_paths
from pentad.schedules.draw.html import RunProgram, timeline_page
from pentad.schedules.draw.page_program import DrawnMemory, DrawnMessages, PathPiece, saved_activations
from pentad.schedules.draw.svg import svg_comparison
from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline, grouped
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters

if TYPE_CHECKING:
    from pentad.orchestrator.config.config import RunConfig  # slow to import, for a process that draws

_STEP = attrgetter("step")


class DrawnRun(NamedTuple):
    """What drawings say about a run; `model` is a description. If the plan is known, `memory` is the planned memory at
    each instruction and `messages` are the planned messages inside layers; else `unplanned` may say why not."""

    name: str
    mesh: Mesh
    program: Program
    batch: BatchSpec
    model: str
    memory: DrawnMemory | None = None
    messages: tuple[DrawnMessages, ...] = ()
    unplanned: str = ""

    @staticmethod
    def of_plan(plan: Plan) -> DrawnRun:
        """The drawing of a plan, with its memory unless the program is an evaluation's."""
        planned = None if plan.program.forward_only else planned_memory(plan), planned_messages(plan)
        return DrawnRun(plan.name, plan.mesh, plan.program, plan.batch, _size(plan.model), *planned)

    @staticmethod
    def of_config(config: RunConfig, program: Program) -> DrawnRun:
        """The drawing of a run with this program. A custom model is only named: its size would require executing the
        user's file."""
        from pentad.orchestrator.planning.layout import batch_spec

        batch, custom = batch_spec(config), config.model.custom
        if program.microbatches in batch.rampup_microbatches:
            batch = batch.with_microbatches(program.microbatches)
        model = _size(config.model.spec) if custom is None else custom
        return DrawnRun(config.run.name, config.mesh.mesh, program, batch, model)


def _size(model: ModelSpec) -> str:
    return f"{num_parameters(model):,} parameters, {model.layers} layers"


def simulate_steps(plan: Plan | DrawnRun, measured: Timeline, costs: Costs) -> Timeline:
    """Every step of `measured`, simulated with the costs measured in that step, over the ranks of the mesh.

    `costs` are used for steps that lack the F, B or W of some stage.
    """
    spans: list[Span] = []
    for step in measured.steps:
        own = read_costs(plan.program, measured.of_step(step)) or costs
        spans += to_mesh_ranks(simulate(plan.program, own, step=step), plan.mesh).spans
    return Timeline("simulated", tuple(spans))


def run_trace(plan: Plan, measured: Timeline, simulated: Timeline, names: dict[int, str]) -> bytes:
    """A trace of measured steps and of one step of `simulate_steps`, the latter with messages inside layers. `names`
    are the ranks' names."""
    return trace_bytes([measured, with_layer_spans(simulated, plan, costs_of(plan))], process_names=names)


def comparison_page(run: DrawnRun, measured: Timeline, simulated: Timeline, figure: str = "") -> str:
    """The HTML page of all measured steps; `simulated` comes from `simulate_steps`, and `figure` is the text of an SVG
    shown below. Without planned memory it shows how many microbatches' activations the ranks save, not bytes."""
    program = run.program
    facts = {
        "schedule": f"{program.name}, {program.microbatches} microbatches",
        "mesh": str(run.mesh),
        "model": run.model,
        "batch": f"{run.batch.global_batch_size} x {run.batch.sequence_length} tokens",
        "program": program.hash[:12],
    }
    facts |= {"planned bytes, messages inside layers": f"none, as {run.unplanned}"} if run.unplanned else {}
    timelines = [measured, simulated]
    paths = [_paths(run, timeline) for timeline in timelines]
    saved = None if program.forward_only else saved_activations(program)
    ran = RunProgram(program, run.mesh, run.memory or saved, paths, run.messages)
    return timeline_page(timelines, title=f"pentad run {run.name}", facts=facts, figure=figure, run=ran)


def _paths(run: DrawnRun, timeline: Timeline) -> dict[int, list[PathPiece]]:
    """The critical path of each step that ran the program, by step."""
    zeros = {step: min(span.start for span in spans) for step, spans in grouped(timeline.spans, _STEP).items()}
    paths = step_paths(run.program, run.mesh, timeline)
    return {step: [_on_clock(piece, zeros[step]) for piece in path] for step, path in paths.items()}


def _on_clock(piece: Piece, zero: float) -> PathPiece:
    return PathPiece(piece.rank, str(piece.key), piece.kind, zero + piece.start / 1e9, zero + piece.end / 1e9)


def comparison_svg(plan: Plan | DrawnRun, measured: Timeline, simulated: Timeline) -> str:
    """The SVG figure of one measured step; `simulated` is the same step of `simulate_steps`."""
    title = f"{plan.name}: {plan.program.name}, {plan.program.microbatches} microbatches, {plan.mesh}"
    return svg_comparison(measured, simulated, title=title)
