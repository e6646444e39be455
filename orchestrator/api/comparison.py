"""`pentad timeline` and `Run.compare`: a run's measured step beside a simulation of it at its measured costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType

from pentad.orchestrator.api.rendering import as_text
from pentad.orchestrator.monitoring.comparison import (
    DrawnRun,
    comparison_page,
    comparison_svg,
    run_trace,
    simulate_steps,
)
from pentad.orchestrator.monitoring.plan_view import bubble_text
from pentad.orchestrator.monitoring.runfolder import (
    EVAL_PROGRAM,
    EVAL_TIMELINE,
    PROGRAM,
    TIMELINE,
    process_names,
    saved_config,
)
from pentad.orchestrator.monitoring.tables import line
from pentad.orchestrator.monitoring.terminal_timeline import bars, is_coloured, legend
from pentad.orchestrator.page.saved_plan import SavedPlan, saved_plan
from pentad.orchestrator.planning.formatting import format_duration
from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.timeline import Timeline


@dataclass(frozen=True, repr=False)
class Comparison:
    """All measured steps of a run, or evaluations, each beside its simulation. `step`, or the evaluation after that
    many steps, is displayed, two rows per rank. `folder` is the run's."""

    folder: Path
    run: DrawnRun
    all_measured: Timeline
    all_simulated: Timeline
    step: int

    @property
    def measured(self) -> Timeline:
        return self.all_measured.of_step(self.step)

    @property
    def simulated(self) -> Timeline:
        return self.all_simulated.of_step(self.step)

    def facts(self) -> dict[str, Any]:
        """Makespan, longest and bubble of both, in seconds and shares, and each rank's seconds of compute."""
        busy = {rank: seconds for rank, (_, _, seconds) in self.measured.busy_by_rank.items()}
        return {
            "step": self.step,
            "measured": figures(self.measured),
            "simulated": figures(self.simulated),
            "busy_seconds": [busy.get(rank, 0.0) for rank in range(self.run.mesh.size)],
        }

    @cached_property
    def planned(self) -> SavedPlan:
        """The plan, for messages inside layers and memory; compiled again when something is drawn with it."""
        return saved_plan(self.folder, self.run.program)

    def html(self) -> str:
        """An interactive page of all measured steps."""
        plan, why = self.planned
        run = self.run._replace(unplanned=why) if plan is None else DrawnRun.of_plan(plan)
        return comparison_page(run, self.all_measured, self.all_simulated)

    def svg(self) -> str:
        """A figure of the step."""
        return comparison_svg(self.run, self.measured, self.simulated)

    @checks_types
    def write_trace(self, path: Path) -> None:
        """Writes a trace that opens in Perfetto (.json.gz)."""
        names, plan = process_names(self.run), self.planned.plan
        if plan is None:
            trace = trace_bytes([self.all_measured, self.simulated], process_names=names)
        else:
            trace = run_trace(plan, self.all_measured, self.simulated, names)
        path.write_bytes(trace)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        coloured, measured, simulated = is_coloured(console), self.measured, self.simulated
        label = len(str(self.run.mesh.size - 1)) + len(" simulated ") + 1
        width, seconds = max(20, options.max_width - label), max(measured.makespan, simulated.makespan)
        drawn = [bars(timeline, width, coloured=coloured, seconds=seconds) for timeline in (measured, simulated)]
        shown = f"evaluation after {self.step} steps" if self.run.program.forward_only else f"step {self.step}"
        yield line((f" {shown}", "bold"), f" of {self.run.name}, {self.run.program.name}")
        for rank, (above, below) in enumerate(zip(*drawn, strict=True)):
            yield line((f"{rank:>{label - 11}} measured  ", "dim"), above)
            yield line((f"{'':>{label - 11}} simulated ", "dim"), below)
        yield line(" " * label, legend(measured, coloured=coloured))
        for timeline in (measured, simulated):
            text = f"{format_duration(timeline.makespan):>8}, bubble {bubble_text(timeline.bubble())}"
            yield line((f" {timeline.source:<10}", "dim"), text)

    __repr__ = as_text
    _repr_svg_ = svg


def compare(folder: Path, step: int | None = None, *, evaluation: bool = False) -> Comparison:
    """Compares a measured step of the last run in `folder`, the last one by default; or the last round of an
    `evaluation` after this many steps. Raises PentadError if it was not measured."""
    measured = measured_timeline(folder, evaluation=evaluation)
    program = Program.load(folder / (EVAL_PROGRAM if evaluation else PROGRAM))
    run = DrawnRun.of_config(saved_config(folder), program)
    _check_ranges(measured, run, folder / (EVAL_TIMELINE if evaluation else TIMELINE))
    costs = read_costs(program, measured)
    if costs is None:
        name, ops = (EVAL_TIMELINE, "F") if evaluation else (TIMELINE, "F, B and W")
        raise PentadError(f"{folder / name} has no complete step: expected one with every stage's {ops}")
    step = measured.steps[-1] if step is None else step
    if step not in measured.steps:
        what = "an evaluation after" if evaluation else "a measured step,"
        raise PentadError(f"--step is {step}: expected {what} {', '.join(map(str, measured.steps))}")
    shown = measured.of_step(step)
    measured_ranks = {span.rank for span in shown.compute}
    if len(measured_ranks) < run.mesh.size or not shown.longest:
        found = f"compute of {len(measured_ranks)} ranks in {shown.longest if measured_ranks else 0:g} s"
        raise PentadError(f"step {step} of run {folder} has {found}: expected all {run.mesh.size} ranks")
    return Comparison(folder, run, measured, simulate_steps(run, measured, costs), step)


def _check_ranges(timeline: Timeline, run: DrawnRun, path: Path) -> None:
    """Raises PentadError for a span of a rank or stage that the run does not have."""
    for name, size in {"rank": run.mesh.size, "peer": run.mesh.size, "stage": run.program.stages}.items():
        largest = max((getattr(span, name) for span in timeline.spans), default=0)
        if largest >= size:
            raise PentadError(f"{path} has {name} {largest}: expected at most {size - 1}, as in the run's program")


def figures(timeline: Timeline) -> dict[str, Any]:
    """Makespan and longest in seconds, and the bubble of each."""
    return {"makespan": timeline.makespan, "longest": timeline.longest, "bubble": asdict(timeline.bubble())}


def measured_timeline(folder: Path, *, evaluation: bool = False) -> Timeline:
    """The timeline of a run's last steps, or of its last evaluations. Raises PentadError if it has none."""
    name, what = (EVAL_TIMELINE, "an evaluation") if evaluation else (TIMELINE, "a step")
    if not (folder / name).is_file():
        expected = f"a run that measured {what} (metrics.timeline_steps) and has ended"
        raise PentadError(f"RUN is '{folder}', which has no {name}: expected {expected}")
    return Timeline.load(folder / name)
