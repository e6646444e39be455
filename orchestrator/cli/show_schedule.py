"""`pentad schedule`: builds, proves, simulates and draws a program; needs neither torch nor Ray."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.api.schedules import MOST_CELLS, Schedule, schedule
from pentad.orchestrator.cli.arguments import ScheduleArguments
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.schedules.catalogue import CATALOGUE, CUSTOM
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.search.auto import AUTO
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.workers.checkpoint.atomic_io import partial_file


def show_schedule(arguments: ScheduleArguments, console: Console) -> None:
    """Raises PentadError on a mistake in the arguments or a file that cannot be written."""
    built, files = _build(arguments), arguments.files
    shown = [built, *_beside(arguments)]
    for option, path in files.items():
        write(option, path, _content(option, shown, arguments))
    facts = built.facts(with_streams=arguments.as_json)
    if arguments.what_if:
        facts |= built.bounds()
    if arguments.as_json:
        print(json.dumps(facts))
        return
    if arguments.grid or not (files or built.cells > MOST_CELLS):
        for line in built.grid(console):
            console.print(line, soft_wrap=True)
        console.print()
    lines = built.lines() | {option.removeprefix("--"): f"written to {path}" for option, path in files.items()}
    if built.cells > MOST_CELLS and not (arguments.grid or files):
        lines["grid"] = f"{built.cells} cells wide: print it with --grid, or draw it with --svg FILE or --html FILE"
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<12}", "dim"), text), soft_wrap=True)
    if arguments.what_if:
        for part in _bounds_view(facts):
            console.print(part, soft_wrap=True)


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
    with output_file(option, path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def output_file(option: str, path: Path) -> Iterator[Path]:
    """A file to write. It appears at `path` when the block ends, and what was there stays if the block fails; a device
    or pipe is written directly. Raises PentadError, naming the option, if it cannot be written."""
    is_special = path.exists() and not path.is_file()
    try:
        with nullcontext(path) if is_special else partial_file(path.resolve()) as file:
            yield file
    except OSError as error:
        reason = error.strerror or str(error)
        raise PentadError(f"{option} is '{path}', which cannot be written ({reason}): expected a file's path") from None


def _build(arguments: ScheduleArguments) -> Schedule:
    given = {name: getattr(arguments, name) for name in inspect.signature(schedule).parameters}
    return schedule(**given | {"costs": _three(arguments.costs)})


def _three(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        raise PentadError(f"--costs is '{text}': expected three numbers F,B,W such as 1,1,1") from None
    return forward, backward, weight


def _beside(arguments: ScheduleArguments) -> list[Schedule]:
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


def _content(option: str, shown: list[Schedule], arguments: ScheduleArguments) -> str | bytes:
    first, *others = shown
    match option:
        case "--svg":
            return first.svg()
        case "--html":
            facts = {"costs F,B,W": arguments.costs, "a transfer": f"{arguments.comm:g}"}
            return first.html(*others, facts=facts, limit=arguments.memory_limit)
        case "--arrow":
            return first.program.to_bytes()
        case _:
            return first.csv()
