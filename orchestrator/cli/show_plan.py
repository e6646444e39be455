"""`pentad plan`: what a run will do, what it needs, and what its ranks will send each other."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from pentad.orchestrator.api.plans import PlannedRun
from pentad.orchestrator.cli.show_schedule import write


def show_plan(found: PlannedRun, console: Console, *, html: Path | None = None, as_json: bool) -> int:
    """Prints it, and writes the page of its memory to `html`. Returns the exit status: 1 if it would not run. Raises
    PentadError if that file cannot be written."""
    if html is not None:
        write("--html", html, found.memory_page())
    if as_json:
        print(json.dumps(found.facts()))
    else:
        console.print(found, crop=False)
    return int(not found.ok)
