"""`pentad schedule`: builds, proves, simulates and draws a program; needs neither torch nor Ray."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.cli.arguments import ScheduleArguments
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.monitoring.terminal_timeline import bars, coloured_grid, is_coloured
from pentad.schedules.catalogue import CATALOGUE, CUSTOM, generate
from pentad.schedules.compiler import compile_program, summary
from pentad.schedules.draw.grid import time_cells, time_grid
from pentad.schedules.draw.html import SimulatedProgram, schedule_page
from pentad.schedules.draw.svg import svg_grid
from pentad.schedules.generators.torch_csv import torch_csv
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import AUTO, choose, describe
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import breakdown, critical_path, what_if
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions

MOST_CELLS = 200  # widest grid that is printed without --grid


@dataclass(frozen=True)
class Built:
    """A proven program with its costs; `chosen` says how `auto` came to it."""

    program: Program
    costs: Costs
    chosen: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated when it is first drawn: a large program has hundreds of thousands of spans."""
        return simulate(self.program, self.costs)

    @property
    def title(self) -> str:
        """'4 ranks, 8 microbatches' and the slices, if any."""
        sizes = f"{self.program.ranks} ranks, {self.program.microbatches} microbatches"
        return sizes + (f" of {self.program.slices} slices" if self.program.slices > 1 else "")


def show_schedule(arguments: ScheduleArguments, console: Console) -> None:
    """Raises PentadError on a mistake in the arguments or a file that cannot be written."""
    built, files = _build(arguments), arguments.files
    shown = [built, *_beside(arguments)]
    for option, path in files.items():
        write(option, path, _content(option, shown, arguments))
    facts = summary(built.program, built.costs, with_streams=arguments.as_json)
    if arguments.what_if:
        facts |= bounds(built.program, built.costs)
    if arguments.as_json:
        print(json.dumps(facts))
        return
    cells = _cells(built, facts["makespan"])
    if arguments.grid or not (files or cells > MOST_CELLS):
        for line in _grid(built, console):
            console.print(line, soft_wrap=True)
        console.print()
    peaks = ", ".join(f"{peak:g}" for peak in facts["peak_activations"])
    bubble = facts["bubble"]
    lines = {
        "schedule": f"{built.program.name}, {built.title}, proven, hash {built.program.hash[:12]}",
        **({"auto": built.chosen} if built.chosen else {}),
        "makespan": f"{facts['makespan']:g}, bubble {100 * bubble['makespan']:.2f} %",
        "longest": f"{facts['longest']:g}, bubble {100 * bubble['longest']:.2f} %, where a step needs no barrier",
        "activations": f"{peaks} microbatches at the peak of each rank",
        **{option.removeprefix("--"): f"written to {path}" for option, path in files.items()},
    }
    if cells > MOST_CELLS and not (arguments.grid or files):
        lines["grid"] = f"{cells} cells wide: print it with --grid, or draw it with --svg FILE or --html FILE"
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<12}", "dim"), text), soft_wrap=True)
    if arguments.what_if:
        for part in _bounds_view(facts):
            console.print(part, soft_wrap=True)


def bounds(program: Program, costs: Costs) -> dict[str, Any]:
    """The critical path's shares by op and by rank, and the step under changed costs."""
    path = critical_path(program, costs)
    seconds, found = path[-1].end - path[0].start, breakdown(path)
    by_op = {str(op): part / seconds for op, part in found.by_op.items()}
    by_rank = {str(rank): part / seconds for rank, part in found.by_rank.items()}
    scenarios = [scenario._asdict() for scenario in what_if(program, costs)]
    return {"critical_path": {"by_op": by_op, "by_rank": by_rank}, "what_if": scenarios}


def _bounds_view(facts: dict[str, Any]) -> tuple[Text, Text, Table]:
    parts = [
        f"{kind} " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share > 0.005)
        for kind, shares in zip(("by op", "by rank"), facts["critical_path"].values(), strict=True)
    ]
    rows = [
        (row["name"], f"{row['makespan']:g}", f"{row['longest']:g}", f"{row['change']:+.1f} %")
        for row in facts["what_if"]
    ]
    table = fitted_table(("what if", "makespan>", "longest>", "change>"), rows, 0, drop=())
    return Text.assemble(("critical    ", "dim"), "; ".join(parts)), Text(), table


def write(option: str, path: Path, content: str | bytes) -> None:
    """Raises PentadError naming the option if the file cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PentadError(f"{option} is '{path}', which cannot be written ({reason}): expected a file's path") from None


def _build(arguments: ScheduleArguments) -> Built:
    forward, backward, weight = _three(arguments.costs)
    name, sizes = arguments.name, (arguments.ranks, arguments.microbatches)
    options = ScheduleOptions(arguments.chunks, arguments.group, arguments.memory_limit, arguments.slices)

    def costs_of(placed: Program) -> Costs:
        parts = {"chunks": placed.chunks, "slices": placed.slices}
        return Costs.uniform(placed.stages, forward, backward, weight, **parts, transfer=arguments.comm)

    if name == AUTO:
        choice = choose(*sizes, costs_of, options)
        order, options, chosen = choice.best.program, ScheduleOptions(), describe(choice)
    else:
        order, chosen = generate(name, *sizes, options), ""
    costs, memory_options = costs_of(order), _memory_options(arguments, order)
    program = compile_program(
        name,
        *sizes,
        costs=costs,
        replicas=2 if memory_options.zero else 1,  # one replica has nothing to shard
        post_validation=arguments.post_validation,
        options=options,
        memory_options=memory_options,
        order=order if chosen else None,  # others may depend on the costs, which depend on the order's placement
    )
    return Built(program, costs, chosen)


def _memory_options(arguments: ScheduleArguments, order: Program) -> MemoryOptions:
    """Raises PentadError on options that are out of range, or that need another one."""
    zero, prefetch = arguments.zero or 0, 1 if arguments.prefetch is None else arguments.prefetch
    gathered, resident = arguments.max_gathered, arguments.max_resident
    if not 0 <= zero <= 3:
        raise PentadError(f"--zero is {zero}: expected a stage of ZeRO, 0 to 3")
    if gathered is not None and (zero < 3 or gathered < 1):
        raise PentadError(f"--max-gathered is {gathered} with --zero {zero}: expected at least 1 with --zero 3")
    if arguments.prefetch is not None and (zero < 1 or prefetch < 0):
        raise PentadError(f"--prefetch is {prefetch} with --zero {zero}: expected at least 0 with --zero 1, 2 or 3")
    if resident is not None and not 0 < resident < inf:
        raise PentadError(f"--max-resident is {resident:g}: expected a number of microbatches greater than 0")
    return MemoryOptions(zero, prefetch, gathered, _stages(arguments.recompute, order), resident)


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


def _three(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        raise PentadError(f"--costs is '{text}': expected three numbers F,B,W such as 1,1,1") from None
    return forward, backward, weight


def _beside(arguments: ScheduleArguments) -> list[Built]:
    """The schedule of --beside, with the same sizes and costs and the options that it accepts."""
    other = arguments.beside
    if other is None:
        return []
    if arguments.html is None:
        raise PentadError(f"--beside is '{other}' without --html: expected both, as it is drawn on the page")
    accepted: Collection[str] = CUSTOM.accepts if ":" in other else ()
    if other == AUTO:
        accepted = ScheduleOptions._fields
    elif other in CATALOGUE:
        accepted = CATALOGUE[other].accepts
    dropped: dict[str, Any] = {option: None for option in ScheduleOptions._fields if option not in accepted}
    try:
        return [_build(replace(arguments, name=other, **dropped))]
    except (PentadError, ScheduleError) as error:
        raise PentadError(f"--beside is '{other}': {str(error).partition(chr(10))[0]}") from None


def _content(option: str, shown: list[Built], arguments: ScheduleArguments) -> str | bytes:
    first = shown[0]
    match option:
        case "--svg":
            return svg_grid(first.timeline, title=f"{first.program.name}, {first.title}", timed=False)
        case "--html":
            names = " and ".join(one.program.name for one in shown)
            facts = {"costs F,B,W": arguments.costs, "a transfer": f"{arguments.comm:g}"}
            facts["program"] = ", ".join(one.program.hash[:12] for one in shown)
            drawn = [SimulatedProgram(one.program, one.costs, one.timeline) for one in shown]
            return schedule_page(drawn, title=f"{names}, {first.title}", facts=facts, limit=arguments.memory_limit)
        case "--arrow":
            return first.program.to_bytes()
        case _:
            return torch_csv(first.program)


def _cells(built: Built, makespan: float) -> int:
    """Width of the time grid."""
    costs = built.costs
    return round(makespan / min(*costs.forward, *costs.backward, *costs.weight))


def _grid(built: Built, console: Console) -> list[Text]:
    """The time grid; in a terminal too narrow for it, bars that fill the terminal."""
    grid = time_grid(built.program, built.timeline, built.costs)
    if not console.is_terminal:
        return [Text(line) for line in grid.splitlines()]
    coloured = is_coloured(console)
    if max(map(len, grid.splitlines())) > console.width:
        return bars(built.timeline, console.width, coloured=coloured)
    if coloured:
        return coloured_grid(time_cells(built.program, built.timeline, built.costs))
    return [Text(line) for line in grid.splitlines()]
