"""`pentad schedule`: builds, proves, simulates and draws a program; needs neither torch nor Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.progress_bars import bars, coloured_grid, is_coloured
from pentad.schedules.catalogue import CATALOGUE, OWN, generate
from pentad.schedules.compiler import compile_program, summary
from pentad.schedules.draw.grid import time_grid
from pentad.schedules.draw.html import schedule_page
from pentad.schedules.draw.page_program import Drawn
from pentad.schedules.draw.svg import svg_grid
from pentad.schedules.generators.torch_csv import torch_csv
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import AUTO, choose, describe
from pentad.schedules.simulate.analysis import critical_path, shares
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.simulate.whatif import what_if
from pentad.schedules.spec.schedule_spec import MemoryOptions, Options


@dataclass(frozen=True)
class Request:
    """A schedule by name and sizes, as asked for on the command line."""

    name: str
    ranks: int
    microbatches: int
    chunks: int | None = None
    group: int | None = None
    costs: str = "1,1,1"
    comm: float = 0.0
    memory_limit: float | None = None
    slices: int | None = None
    recompute: str | None = None
    keep: float | None = None
    zero: int | None = None
    gathered: int | None = None
    prefetch: int | None = None
    post_validation: bool = False


@dataclass(frozen=True)
class Outputs:
    """Where it goes: files by the name of their option, the terminal as a grid, stdout as JSON. `beside` is another
    schedule that the page draws too."""

    files: dict[str, Path]
    grid: bool
    what_if: bool
    as_json: bool
    beside: str | None = None


def show_schedule(request: Request, outputs: Outputs, console: Console) -> None:
    """Raises PentadError on a mistake in the request or a file that cannot be written."""
    program, costs, chosen = _build(request)
    timeline = simulate(program, costs)
    shown = [Drawn(program, costs, timeline), *_beside(request, outputs)]
    for option, path in outputs.files.items():
        write(option, path, _content(option, shown, request))
    facts = summary(program, costs)
    if outputs.what_if:
        facts |= bounds(program, costs)
    if outputs.as_json:
        print(json.dumps(facts))
        return
    if outputs.grid or not outputs.files:
        for line in _grid(program, timeline, costs, console):
            console.print(line, soft_wrap=True)
        console.print()
    peaks = ", ".join(f"{peak:g}" for peak in facts["peak_activations"])
    bubble = facts["bubble"]
    sizes = f"{program.ranks} ranks, {program.microbatches} microbatches" + _sliced(program)
    lines = {
        "schedule": f"{program.name}, {sizes}, proven, hash {program.hash[:12]}",
        **({"auto": chosen} if chosen else {}),
        "makespan": f"{facts['makespan']:g}, bubble {100 * bubble['makespan']:.2f} %",
        "longest": f"{facts['longest']:g}, bubble {100 * bubble['longest']:.2f} %, where a step needs no barrier",
        "activations": f"{peaks} microbatches at the peak of each rank",
        **{option.removeprefix("--"): f"written to {path}" for option, path in outputs.files.items()},
    }
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<12}", "dim"), text), soft_wrap=True)
    if outputs.what_if:
        for part in _bounds_view(facts):
            console.print(part, soft_wrap=True)


def bounds(program: Program, costs: Costs) -> dict[str, Any]:
    """What the step's end waits for, as shares of its time, and the makespan under other costs."""
    path = critical_path(program, costs)
    whole, found = path[-1].end - path[0].start, shares(path)
    by_op = {str(op): seconds / whole for op, seconds in found.by_op.items()}
    by_rank = {str(rank): seconds / whole for rank, seconds in found.by_rank.items()}
    rows = [row._asdict() for row in what_if(program, costs)]
    return {"critical_path": {"by_op": by_op, "by_rank": by_rank}, "what_if": rows}


def _bounds_view(facts: dict[str, Any]) -> tuple[Text, Text, Table]:
    parts = [
        f"{kind} " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share > 0.005)
        for kind, shares in zip(("by op", "by rank"), facts["critical_path"].values(), strict=True)
    ]
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for head in ("what if", "makespan", "longest", "change"):
        table.add_column(head, justify="left" if head == "what if" else "right")
    for row in facts["what_if"]:
        table.add_row(row["name"], f"{row['makespan']:g}", f"{row['longest']:g}", f"{row['change']:+.1f} %")
    return Text.assemble(("critical    ", "dim"), "; ".join(parts)), Text(), table


def write(option: str, path: Path, content: str | bytes) -> None:
    """Raises PentadError naming the option when the file cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PentadError(f"{option} is '{path}', which cannot be written ({reason}): expected a file's path") from None


def _build(request: Request) -> tuple[Program, Costs, str]:
    """The program, its costs and, where it was chosen, a few words on that."""
    forward, backward, weight = _three(request.costs)
    name, options = request.name, Options(request.chunks, request.group, request.memory_limit, request.slices)

    def costs_of(placed: Program) -> Costs:
        parts = {"chunks": placed.chunks, "slices": placed.slices}
        return Costs.uniform(placed.stages, forward, backward, weight, **parts, transfer=request.comm)

    sizes = request.ranks, request.microbatches
    if name == AUTO:
        choice = choose(*sizes, costs_of, options)
        order, options, chosen = choice.best.program, Options(), describe(choice)
    else:
        order, chosen = generate(name, *sizes, options), ""
    costs, savings = costs_of(order), _savings(request, order)
    program = compile_program(
        name,
        *sizes,
        costs=costs,
        replicas=2 if savings.zero else 1,  # one holder alone shares nothing
        validated=request.post_validation,
        options=options,
        savings=savings,
        order=order if chosen else None,
    )
    return program, costs, chosen


def _savings(request: Request, order: Program) -> MemoryOptions:
    """Raises PentadError on options that have no meaning, or none without another."""
    zero, prefetch = request.zero or 0, 1 if request.prefetch is None else request.prefetch
    if not 0 <= zero <= 3:
        raise PentadError(f"--zero is {zero}: expected a stage of ZeRO, 0 to 3")
    if request.gathered is not None and (zero < 3 or request.gathered < 1):
        raise PentadError(f"--gathered is {request.gathered} with --zero {zero}: expected at least 1 with --zero 3")
    if request.prefetch is not None and (zero < 1 or prefetch < 0):
        raise PentadError(f"--prefetch is {prefetch} with --zero {zero}: expected at least 0 with --zero 1, 2 or 3")
    if request.keep is not None and not 0 < request.keep < inf:
        raise PentadError(f"--keep is {request.keep:g}: expected a number of activations greater than 0")
    return MemoryOptions(zero, prefetch, request.gathered, _stages(request.recompute, order), request.keep)


def _stages(text: str | None, order: Program) -> frozenset[int]:
    """The stages that `--recompute` names."""
    if text in (None, "all"):
        return frozenset(range(order.stages) if text else ())
    try:
        found = frozenset(int(part) for part in str(text).split(","))
    except ValueError:
        found = frozenset({-1})
    if not found <= set(range(order.stages)):
        raise PentadError(f"--recompute is '{text}': expected all or stages of 0 to {order.stages - 1}, such as 0,1")
    return found


def _sliced(program: Program) -> str:
    return f" of {program.slices} slices" if program.slices > 1 else ""


def _three(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        raise PentadError(f"--costs is '{text}': expected three numbers F,B,W such as 1,1,1") from None
    return forward, backward, weight


def _beside(request: Request, outputs: Outputs) -> list[Drawn]:
    """The schedule of --beside, for the same sizes and costs and with those of the options that it takes."""
    other = outputs.beside
    if other is None:
        return []
    if "--html" not in outputs.files:
        raise PentadError(f"--beside is '{other}', but it is drawn on a page and no --html is given")
    try:
        program, costs, _ = _build(_asked(request, other))
    except (PentadError, ScheduleError) as error:
        raise PentadError(f"--beside is '{other}': {str(error).partition(chr(10))[0]}") from None
    return [Drawn(program, costs, simulate(program, costs))]


def _asked(request: Request, other: str) -> Request:
    """The same of another schedule, less the options that it does not take."""
    if other == AUTO:
        return replace(request, name=other)
    takes = OWN.takes if ":" in other else CATALOGUE[other].takes if other in CATALOGUE else frozenset()
    return replace(
        request,
        name=other,
        chunks=request.chunks if "chunks" in takes else None,
        group=request.group if "group" in takes else None,
        memory_limit=request.memory_limit if "limit" in takes else None,
        slices=request.slices if "slices" in takes else None,
    )


def _content(option: str, shown: list[Drawn], request: Request) -> str | bytes:
    program, _, timeline = shown[0]
    names = " and ".join(one.program.name for one in shown)
    drawn = names if option == "--html" else program.name
    title = f"{drawn}, {program.ranks} ranks, {program.microbatches} microbatches" + _sliced(program)
    match option:
        case "--svg":
            return svg_grid(timeline, title=title, timed=False)
        case "--html":
            facts = {"costs F,B,W": request.costs, "a transfer": f"{request.comm:g}"}
            facts["program"] = ", ".join(one.program.hash[:12] for one in shown)
            return schedule_page(shown, title=title, facts=facts, limit=request.memory_limit)
        case "--arrow":
            return program.to_bytes()
        case _:
            return torch_csv(program)


def _grid(program: Program, timeline: Timeline, costs: Costs, console: Console) -> list[Text]:
    """The time grid; in a terminal that is too narrow for it, bars as wide as the terminal."""
    grid = time_grid(program, timeline, costs)
    if not console.is_terminal:
        return [Text(line) for line in grid.splitlines()]
    coloured = is_coloured(console)
    if max(map(len, grid.splitlines())) > console.width:
        return bars(timeline, console.width, coloured=coloured)
    return coloured_grid(grid) if coloured else [Text(line) for line in grid.splitlines()]
