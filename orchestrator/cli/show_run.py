"""`pentad timeline`: what a run did."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.cli.show_schedule import write
from pentad.orchestrator.monitoring.display import bubble_text
from pentad.orchestrator.monitoring.progress_bars import bars, is_coloured, legend
from pentad.orchestrator.monitoring.runfolder import (
    PROGRAM,
    TIMELINE,
    comparison_page,
    process_names,
    resolve_run,
    saved_config,
)
from pentad.orchestrator.planning.estimate import read_costs
from pentad.orchestrator.planning.planning import make_plan, spread
from pentad.orchestrator.planning.quantities import duration
from pentad.schedules.draw.palette import LOOKS
from pentad.schedules.draw.trace import write_trace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.plan import Plan


def show_timeline(
    run: str, console: Console, *, html: Path | None = None, trace: Path | None = None, as_json: bool = False
) -> None:
    """Compares the last measured step of a run with its program simulated at measured costs, a row a rank."""
    folder = resolve_run(run)
    plan, measured = _measured(folder)
    costs = read_costs(plan.program, measured)
    if costs is None:
        raise PentadError(f"{folder / TIMELINE} has no complete step: expected one with every stage's F, B and W")
    simulated = simulate(plan.program, costs, step=measured.steps[-1])
    if html is not None:
        write("--html", html, comparison_page(plan, measured, simulated))
    if trace is not None:
        write("--trace", trace, b"")  # one sentence if that fails
        write_trace(trace, [measured, spread(simulated, plan.mesh)], process_names=process_names(plan))
    last = measured.of_step(measured.steps[-1])
    if as_json:
        facts = {
            "run": str(folder),
            "step": last.steps[0],
            "measured": figures(last),
            "simulated": figures(simulated),
        }
        busy = {rank: seconds for rank, (_, _, seconds) in last.by_rank().items()}
        print(json.dumps({**facts, "busy_seconds": [busy.get(r, 0.0) for r in range(plan.mesh.size)]}))
        return
    _print_comparison(plan, last, spread(simulated, plan.mesh), console)
    for path in filter(None, (html, trace)):
        console.print(Text(f" written to {path}"), soft_wrap=True)


def _print_comparison(plan: Plan, measured: Timeline, simulated: Timeline, console: Console) -> None:
    coloured = is_coloured(console)
    seconds = max(measured.makespan, simulated.makespan)
    label = len(str(plan.mesh.size - 1)) + len(" simulated ") + 1
    width = max(20, console.width - label)
    above = bars(simulated, width, coloured=coloured, seconds=seconds)
    below = bars(measured, width, coloured=coloured, seconds=seconds)
    console.print(Text.assemble((f" step {measured.steps[0]}", "bold"), f" of {plan.name}, {plan.program.name}"))
    for rank, rows in enumerate(zip(above, below, strict=True)):
        for source, row in zip(("simulated", "measured"), rows, strict=True):
            head = f"{rank if source == 'simulated' else '':>{label - 11}} {source:<9} "
            console.print(Text.assemble((head, "dim"), row, no_wrap=True))
    ops = [op for op in LOOKS if any(span.op == op for span in measured.compute)]
    console.print(Text.assemble(" " * label, legend(ops, coloured=coloured)))
    for timeline in (simulated, measured):
        text = f"{duration(timeline.makespan):>8}, bubble {bubble_text(timeline.bubble())}"
        console.print(Text.assemble((f" {timeline.source:<10}", "dim"), text), soft_wrap=True)


def _measured(folder: Path) -> tuple[Plan, Timeline]:
    if not (folder / TIMELINE).is_file():
        expected = "a run that measured a step (metrics.timeline_steps) and has ended"
        raise PentadError(f"RUN is '{folder}', which has no {TIMELINE}: expected {expected}")
    config = saved_config(folder)
    plan = replace(make_plan(config, "cpu"), program=Program.load(folder / PROGRAM))
    return plan, Timeline.load(folder / TIMELINE)


def figures(timeline: Timeline) -> dict[str, Any]:
    return {"makespan": timeline.makespan, "longest": timeline.longest, "bubble": asdict(timeline.bubble())}
