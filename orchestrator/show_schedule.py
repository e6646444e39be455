"""`pentad schedule`: builds, proves, simulates and draws a program; needs neither torch nor Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.bars import bars, coloured_grid, is_coloured
from pentad.schedules.auto import AUTO, choose
from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program, summary
from pentad.schedules.costs import Costs
from pentad.schedules.errors import PentadError
from pentad.schedules.grid import time_grid
from pentad.schedules.page import timeline_page
from pentad.schedules.program import Program
from pentad.schedules.shape import Options
from pentad.schedules.simulate import simulate
from pentad.schedules.svg import svg_grid
from pentad.schedules.timeline import Timeline
from pentad.schedules.torch_csv import torch_csv


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


@dataclass(frozen=True)
class Outputs:
    """Where it goes: files by the name of their option, the terminal as a grid, stdout as JSON."""

    files: dict[str, Path]
    grid: bool
    as_json: bool


def show_schedule(request: Request, outputs: Outputs, console: Console) -> None:
    """Raises PentadError on a mistake in the request or a file that cannot be written."""
    program, costs = _build(request)
    timeline = simulate(program, costs)
    for option, path in outputs.files.items():
        write(option, path, _content(option, program, timeline))
    facts = summary(program, costs)
    if outputs.as_json:
        print(json.dumps(facts))
        return
    if outputs.grid or not outputs.files:
        for line in _grid(program, timeline, costs, console):
            console.print(line, soft_wrap=True)
        console.print()
    peaks = ", ".join(f"{peak:g}" for peak in facts["peak_activations"])
    bubble = facts["bubble"]
    sizes = f"{program.ranks} ranks, {program.microbatches} microbatches"
    lines = {
        "schedule": f"{program.name}, {sizes}, proven, hash {program.hash[:12]}",
        "makespan": f"{facts['makespan']:g}, bubble {100 * bubble['makespan']:.2f} %",
        "longest": f"{facts['longest']:g}, bubble {100 * bubble['longest']:.2f} %, where a step needs no barrier",
        "activations": f"{peaks} microbatches at the peak of each rank",
        **{option.removeprefix("--"): f"written to {path}" for option, path in outputs.files.items()},
    }
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<12}", "dim"), text), soft_wrap=True)


def write(option: str, path: Path, content: str | bytes) -> None:
    """Raises PentadError naming the option when the file cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PentadError(f"{option} is '{path}', which cannot be written ({reason}), wanted a file's path") from None


def _build(request: Request) -> tuple[Program, Costs]:
    forward, backward, weight = _three(request.costs)
    name, options = request.name, Options(request.chunks, request.group, request.memory_limit)

    def costs_of(placed: Program) -> Costs:
        return Costs.uniform(placed.stages, forward, backward, weight, chunks=placed.chunks, transfer=request.comm)

    if name == AUTO:
        name, options = choose(request.ranks, request.microbatches, costs_of, request.memory_limit).best[:2]
    sizes = name, request.ranks, request.microbatches
    costs = costs_of(generate(*sizes, options))
    return compile_program(*sizes, costs=costs, options=options), costs


def _three(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        raise PentadError(f"--costs is '{text}', wanted three numbers F,B,W such as 1,1,1") from None
    return forward, backward, weight


def _content(option: str, program: Program, timeline: Timeline) -> str | bytes:
    title = f"{program.name}, {program.ranks} ranks, {program.microbatches} microbatches"
    match option:
        case "--svg":
            return svg_grid(timeline, title=title)
        case "--html":
            return timeline_page(timeline, None, title=title, facts={"program": program.hash[:12]})
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
