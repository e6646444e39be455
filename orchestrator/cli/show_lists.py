"""`pentad runs` and `pentad schedules`: lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.monitoring.runfolder import CONFIG, METRICS
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.planning.formatting import format_number
from pentad.schedules.catalogue import CATALOGUE, looped, mirrored, v_shaped
from pentad.schedules.ir.errors import PentadError

_PLACEMENTS: dict[Any, str] = {looped: "loop", mirrored: "mirror", v_shaped: "V"}


def show_runs(folder: Path, console: Console, *, as_json: bool) -> None:
    """Lists the runs in `folder`, most recently active first. Raises PentadError if there is no such folder."""
    if not folder.is_dir():
        raise PentadError(f"--folder is '{folder}', which is not a folder: expected one that holds runs")
    found = [_run(path.parent) for path in folder.glob(f"*/{CONFIG}")]
    found.sort(key=lambda run: run["time"], reverse=True)
    if as_json:
        print(json.dumps({"folder": str(folder), "runs": found}))
        return
    if not found:
        print(f"no runs in {folder}")
        return
    rows = []
    for run in found:
        steps = f"{run['step']}/{run['steps']}" if run["steps"] else "-"
        rows.append((run["name"], run["state"], steps, format_number(run["loss"], ".4f"), clock(run["time"])))
    print_table(console, ("run", "state", "step>", "loss>", "last active"), rows, wrapped="run")


def show_schedules(console: Console, *, as_json: bool) -> None:
    """Lists the schedules of the catalogue."""
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "placement": _PLACEMENTS[entry.placement],
            "chunks": entry.chunks,
            "slices": entry.slices,
            "options": sorted(entry.accepts),
            "summary": entry.summary,
            "paper": entry.paper,
        }
        for name, entry in CATALOGUE.items()
    ]
    if as_json:
        print(json.dumps({"schedules": found}))
        return
    rows = []
    for each in found:
        options = ", ".join(each["options"]).replace("_", "-") or "-"
        rows.append((*(str(each[key]) for key in ("name", "placement", "chunks", "slices")), options, each["paper"]))
    print_table(console, ("schedule", "placement", "chunks>", "slices>", "options", "paper"), rows, wrapped="paper")
    text = " auto tries all of them and searches beyond; FILE.py:FUNCTION, FILE.csv and FILE.arrow are your own"
    console.print(text, soft_wrap=True, highlight=False)


def _run(folder: Path) -> dict[str, Any]:
    """A row of `pentad runs`; a run that this version cannot read is listed as unreadable."""
    from pentad.orchestrator.api.runs import Run
    from pentad.orchestrator.control.control_client import ended

    path = folder / METRICS if (folder / METRICS).exists() else folder / CONFIG
    found = {"name": folder.name, "state": "unreadable", "step": 0, "steps": 0, "loss": None}
    try:
        try:
            status = Run(folder).status(1.0)
        except PentadError:  # live, but it does not answer, or only on another machine
            status = ended(folder) | {"state": "running"}
        found |= {key: status[key] for key in ("state", "step", "steps", "loss")}
    except (PentadError, OSError):
        pass
    return {**found, "time": path.stat().st_mtime}


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: str) -> None:
    """Wraps nothing but the column `wrapped`, and only on a terminal: IDs are copied, and programs read lines."""
    widths = {head.rstrip(">"): 2 + max(map(len, cells)) for head, *cells in zip(heads, heads, *rows, strict=True)}
    if console.is_terminal:
        widths[wrapped] = min(widths[wrapped], 20)
    console.width = max(console.width, sum(widths.values()))
    texts = [tuple(map(Text, row)) for row in rows]
    console.print(fitted_table(heads, texts, console.width, drop=(), wrapped=[wrapped]))


def clock(seconds: float) -> str:
    """A Unix time in local time."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
