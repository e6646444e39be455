"""`pentad timeline`: a run's measured step beside the same step simulated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.api.comparison import compare
from pentad.orchestrator.cli.show_schedule import write
from pentad.orchestrator.monitoring.runfolder import resolve_run


def show_timeline(
    run: str, console: Console, *, step: int | None = None, files: Mapping[str, Path], as_json: bool = False
) -> None:
    """Compares a measured step of a run with its simulation at that step's costs, two rows per rank.

    The default is the last step. `files` are by the option that asks for them: --html (all steps), --svg, --trace.
    """
    folder = resolve_run(run)
    found = compare(folder, step)
    for option, path in files.items():
        match option:
            case "--html":
                write(option, path, found.html())
            case "--svg":
                write(option, path, found.svg())
            case _:
                write(option, path, b"")  # reports a path that cannot be written
                found.write_trace(path)
    if as_json:
        print(json.dumps({"run": str(folder), **found.facts()}))
        return
    console.print(found, crop=False)
    for path in files.values():
        console.print(Text(f" written to {path}"), soft_wrap=True)
