"""`pentad plan`: what a run will do, what it needs, and what its ranks will send each other."""

from __future__ import annotations

import json

from rich.console import Console

from pentad.orchestrator.api.plans import PlannedRun


def show_plan(found: PlannedRun, console: Console, *, as_json: bool) -> int:
    """Prints it. Returns the exit status: 1 if it would not run."""
    if as_json:
        print(json.dumps(found.facts()))
    else:
        console.print(found, crop=False)
    return int(not found.ok)
