"""`pentad timeline`: a run's measured step beside the same step simulated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.cli.show_schedule import write
from pentad.orchestrator.monitoring.comparison import comparison_page, comparison_svg, simulate_steps
from pentad.orchestrator.monitoring.plan_view import bubble_text
from pentad.orchestrator.monitoring.runfolder import PROGRAM, TIMELINE, process_names, resolve_run, saved_config
from pentad.orchestrator.monitoring.terminal_timeline import bars, is_coloured, legend
from pentad.orchestrator.planning.estimate import read_costs
from pentad.orchestrator.planning.formatting import format_duration
from pentad.orchestrator.planning.planning import plan_with
from pentad.schedules.draw.trace import write_trace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan


def show_timeline(
    run: str, console: Console, *, step: int | None = None, files: Mapping[str, Path], as_json: bool = False
) -> None:
    """Compares a measured step of a run with its simulation at that step's costs, two rows per rank.

    The default is the last step. `files` are by the option that asks for them: --html (all steps), --svg, --trace.
    """
    folder = resolve_run(run)
    plan, measured = _load(folder)
    costs = read_costs(plan.program, measured)
    if costs is None:
        raise PentadError(f"{folder / TIMELINE} has no complete step: expected one with every stage's F, B and W")
    simulated = simulate_steps(plan, measured, costs)
    step = measured.steps[-1] if step is None else step
    if step not in measured.steps:
        raise PentadError(f"--step is {step}: expected a measured step, {', '.join(map(str, measured.steps))}")
    chosen, predicted = measured.of_step(step), simulated.of_step(step)
    for option, path in files.items():
        match option:
            case "--html":
                write(option, path, comparison_page(plan, measured, simulated))
            case "--svg":
                write(option, path, comparison_svg(plan, chosen, predicted))
            case _:
                write(option, path, b"")  # reports a path that cannot be written
                write_trace(path, [measured, predicted], process_names=process_names(plan))
    if as_json:
        busy = {rank: seconds for rank, (_, _, seconds) in chosen.busy_by_rank().items()}
        facts = {"run": str(folder), "step": step, "measured": figures(chosen), "simulated": figures(predicted)}
        print(json.dumps({**facts, "busy_seconds": [busy.get(rank, 0.0) for rank in range(plan.mesh.size)]}))
        return
    _print_comparison(plan, chosen, predicted, console)
    for path in files.values():
        console.print(Text(f" written to {path}"), soft_wrap=True)


def figures(timeline: Timeline) -> dict[str, Any]:
    return {"makespan": timeline.makespan, "longest": timeline.longest, "bubble": asdict(timeline.bubble())}


def _load(folder: Path) -> tuple[Plan, Timeline]:
    """The plan that a run last used and its measured timeline."""
    if not (folder / TIMELINE).is_file():
        expected = "a run that measured a step (metrics.timeline_steps) and has ended"
        raise PentadError(f"RUN is '{folder}', which has no {TIMELINE}: expected {expected}")
    plan = plan_with(saved_config(folder), "cpu", Program.load(folder / PROGRAM))
    return plan, Timeline.load(folder / TIMELINE)


def _print_comparison(plan: Plan, measured: Timeline, simulated: Timeline, console: Console) -> None:
    coloured = is_coloured(console)
    label = len(str(plan.mesh.size - 1)) + len(" simulated ") + 1
    width, seconds = max(20, console.width - label), max(measured.makespan, simulated.makespan)
    drawn = [bars(timeline, width, coloured=coloured, seconds=seconds) for timeline in (measured, simulated)]
    console.print(Text.assemble((f" step {measured.steps[0]}", "bold"), f" of {plan.name}, {plan.program.name}"))
    for rank, (above, below) in enumerate(zip(*drawn, strict=True)):
        console.print(Text.assemble((f"{rank:>{label - 11}} measured  ", "dim"), above, no_wrap=True))
        console.print(Text.assemble((f"{'':>{label - 11}} simulated ", "dim"), below, no_wrap=True))
    console.print(Text.assemble(" " * label, legend(measured, coloured=coloured)))
    for timeline in (measured, simulated):
        text = f"{format_duration(timeline.makespan):>8}, bubble {bubble_text(timeline.bubble())}"
        console.print(Text.assemble((f" {timeline.source:<10}", "dim"), text), soft_wrap=True)
