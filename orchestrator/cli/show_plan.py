"""`pentad plan`: what a run will do, what it needs, and what its ranks will send each other."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from pentad.orchestrator.api.plans import PlannedRun
from pentad.orchestrator.cli.show_schedule import output_file, write


def show_plan(
    found: PlannedRun, console: Console, *, html: Path | None = None, trace: Path | None = None, as_json: bool
) -> int:
    """Prints it, and writes the page of its memory to `html` and its step to `trace`. Returns the exit status: 1 if it
    would not run. Raises PentadError if a file cannot be written."""
    if html is not None:
        write("--html", html, found.memory_page())
    if trace is not None:
        with output_file("--trace", trace) as file:
            found.write_trace(file)
    if as_json:
        print(json.dumps(found.facts()))
    else:
        console.print(found, crop=False)
    return int(not found.ok)
