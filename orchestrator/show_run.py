"""`pentad plan` and `pentad timeline`: what a run will do, and what it did."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.bars import bars, is_coloured, legend
from pentad.orchestrator.config import RunConfig
from pentad.orchestrator.display import bubble_text, duration, plan_view, size
from pentad.orchestrator.estimate import costs_of, memory, read_costs
from pentad.orchestrator.planning import make_plan, spread
from pentad.orchestrator.runfolder import PROGRAM, TIMELINE, comparison_page, process_names, resolve_run, saved_config
from pentad.orchestrator.show_schedule import write
from pentad.orchestrator.traffic import traffic
from pentad.schedules.errors import PentadError
from pentad.schedules.palette import LOOKS
from pentad.schedules.plan import Plan
from pentad.schedules.program import Program
from pentad.schedules.simulate import simulate
from pentad.schedules.tensors import parameters
from pentad.schedules.timeline import Timeline
from pentad.schedules.trace import write_trace

_H200 = 139 * 2**30  # bytes that CUDA offers on an NVIDIA H200


def show_plan(config: RunConfig, device: str, console: Console, *, as_json: bool) -> None:
    """Prints what would run on 'cpu' or 'cuda', with guessed costs."""
    plan = make_plan(config, device)
    costs = costs_of(plan)
    fit = _fit(plan)
    if as_json:
        timeline = simulate(plan.program, costs)
        print(json.dumps({**_plan_facts(plan), "predicted": _figures(timeline), "costs": asdict(costs), "fits": fit}))
        return
    for part in plan_view(console, plan, costs, ()):
        console.print(part)
    console.print(Text(" seconds come from assumed rates; a run measures them", "dim"))
    word = "fits" if fit["ok"] else "does not fit"
    needs = f" {word}: needs {size(fit['needed'])} {fit['where']}, which has {size(fit['available'])}"
    console.print(Text(needs, "green" if fit["ok"] else "bold red"), soft_wrap=True)


def show_timeline(
    run: str, console: Console, *, html: Path | None = None, trace: Path | None = None, as_json: bool = False
) -> None:
    """Compares the last measured step of a run with its program simulated at measured costs, a row a rank."""
    folder = resolve_run(run)
    plan, measured = _measured(folder)
    costs = read_costs(plan.program, measured)
    if costs is None:
        raise PentadError(f"{folder / TIMELINE} has no complete step, wanted one with every stage's F, B and W")
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
            "measured": _figures(last),
            "simulated": _figures(simulated),
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
        wanted = "a run that measured a step (metrics.timeline_steps) and has ended"
        raise PentadError(f"RUN is '{folder}', which has no {TIMELINE}, wanted {wanted}")
    config = saved_config(folder)
    plan = replace(make_plan(config, "cpu"), program=Program.load(folder / PROGRAM))
    return plan, Timeline.load(folder / TIMELINE)


def _plan_facts(plan: Plan) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "coordinates": plan.mesh.coordinates(rank)._asdict(),
            "stages": list(plan.stages_of(rank)),
            "layers": [list(plan.layers[stage]) for stage in plan.stages_of(rank)],
            "memory": memory(plan, rank),
            "traffic": traffic(plan, rank),
        }
        for rank in range(plan.mesh.size)
    ]
    return {
        "run": plan.name,
        "device": plan.device,
        "dtype": plan.dtype,
        "transport": plan.transport,
        "mesh": asdict(plan.mesh),
        "parameters": parameters(plan.model),
        "tokens": plan.batch.tokens,
        "schedule": plan.program.name,
        "microbatches": plan.program.microbatches,
        "hash": plan.program.hash,
        "ranks": ranks,
    }


def _figures(timeline: Timeline) -> dict[str, Any]:
    return {"makespan": timeline.makespan, "longest": timeline.longest, "bubble": asdict(timeline.bubble())}


def _fit(plan: Plan) -> dict[str, Any]:
    """CPU ranks share this machine's memory; of a GPU that may not be here an H200 is assumed."""
    each = [memory(plan, rank) for rank in range(plan.mesh.size)]
    if plan.device == "cpu":
        needed, where = sum(parts["total"] + parts["host"] for parts in each), "of this machine"
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        needed, where, available = max(parts["total"] for parts in each), "of an H200 (assumed)", _H200
    return {"ok": needed <= available, "needed": needed, "available": available, "where": where}
