"""A run with made-up times: steps of a program as if measured, each slower and more uneven than simulated."""

from __future__ import annotations

import random
from typing import NamedTuple

from pentad.orchestrator.monitoring.comparison import DrawnRun, comparison_page
from pentad.schedules.compiler import compile_forward_only, compile_program
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.schedule_spec import MemoryOptions

NAMES = ["1f1b", "zb-h2", "zb-v", "dualpipe", "seq-1f1b", "zb-h2 post-validation", "1f1b evaluation"]
STEPS = (3, 4, 5)


class MeasuredRun(NamedTuple):
    """Two replicas of a pipeline of four ranks."""

    program: Program
    mesh: Mesh
    measured: Timeline
    simulated: Timeline

    def page(self, steps: tuple[int, ...] = STEPS, *, other_step: str = "") -> str:
        """The page with these steps; the first is of another schedule, if one is named."""
        measured, simulated = ([t.of_step(step) for step in steps] for t in (self.measured, self.simulated))
        if other_step:
            measured[0] = measured_run(other_step).measured.of_step(steps[0])
        batch = BatchSpec(16, 128, self.program.microbatches, 2)
        run = DrawnRun("trial", self.mesh, self.program, batch, "a model")
        return comparison_page(run, _joined(measured), _joined(simulated))

    def pair_of(self, key: tuple[int, str]) -> list[tuple[int, str]]:
        """Both halves of an overlapped pair, given the first; otherwise the instruction alone."""
        rank, name = key
        stream = self.program.streams[self.mesh.coordinates(rank).pp]
        action = next(each for each in stream if name in [str(part.key) for part in each.parts])
        return [(rank, str(part.key)) for part in action.parts]


def measured_run(name: str, seed: int = 7) -> MeasuredRun:
    """A schedule on dp2 x pp4; 'NAME post-validation' validates its optimizer steps, 'NAME evaluation' only goes
    forward."""
    name, _, how = name.partition(" ")
    mesh, drawn = Mesh(dp=2, pp=4), random.Random(seed)
    program = compile_program(name, 4, 8, replicas=2, post_validation=how == "post-validation")
    if how == "evaluation":
        program = compile_forward_only(program, memory_options=MemoryOptions())
    simulated, measured = list[Span](), list[Span]()
    for step in STEPS:
        forward, backward, weight = (_uneven(drawn, program.stages, each) for each in (1e-3, 1.3e-3, 0.7e-3))
        costs = Costs(forward, backward, weight, transfer=7e-5)
        spans = to_mesh_ranks(simulate(program, costs, step=step), mesh).spans
        simulated += spans
        measured += [_late(drawn, span, 1e5 + step) for span in spans]
    return MeasuredRun(program, mesh, Timeline("measured", tuple(measured)), Timeline("simulated", tuple(simulated)))


def _joined(steps: list[Timeline]) -> Timeline:
    return Timeline(steps[0].source, tuple(span for step in steps for span in step.spans))


def _uneven(drawn: random.Random, stages: int, seconds: float) -> tuple[float, ...]:
    return tuple(seconds * drawn.uniform(0.8, 1.3) for _ in range(stages))


def _late(drawn: random.Random, span: Span, clock: float) -> Span:
    """The span made slower, issued by the host a little late, and with receives posted early."""
    start, end = (1.2 * time for time in (span.start, span.end))
    late = min(drawn.uniform(0, 2e-5), (end - start) / 2)
    return span._replace(start=clock + start + (-late if span.op.startswith("RECV") else late), end=clock + end)
