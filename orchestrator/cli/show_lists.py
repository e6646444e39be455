"""`pentad runs` and `pentad schedules`: lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.runfolder import CONFIG, METRICS
from pentad.orchestrator.planning.quantities import number
from pentad.schedules.catalogue import CATALOGUE, looped, mirrored, v_shaped
from pentad.schedules.ir.errors import PentadError

_PLACEMENTS: dict[Any, str] = {looped: "loop", mirrored: "mirror", v_shaped: "V"}


def show_runs(folder: Path, console: Console, *, as_json: bool) -> None:
    """Lists the runs in `folder`, the last active first. Raises PentadError when there is no such folder."""
    if not folder.is_dir():
        raise PentadError(f"--folder is '{folder}': expected a run.folder, such as runs")
    found = [_run(path.parent) for path in folder.glob(f"*/{CONFIG}")]
    found.sort(key=lambda run: run["time"], reverse=True)
    if as_json:
        print(json.dumps({"folder": str(folder), "runs": found}))
        return
    if not found:
        print(f"no runs in {folder}")
        return
    rows = [
        (
            run["name"],
            run["state"],
            f"{run['step']}/{run['steps']}" if run["steps"] else "-",
            number(run["loss"], ".4f"),
            f"{datetime.fromtimestamp(run['time']):%Y-%m-%d %H:%M}",
        )
        for run in found
    ]
    _print_table(console, ("run", "state", "step>", "loss>", "last active"), rows)


def show_schedules(console: Console, *, as_json: bool) -> None:
    """Lists the schedules of the catalogue."""
    found = [
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
    rows = [
        (
            str(each["name"]),
            str(each["placement"]),
            str(each["chunks"]),
            str(each["slices"]),
            ", ".join(entry.replace("_", "-") for entry in sorted(CATALOGUE[str(each["name"])].accepts)) or "-",
            str(each["paper"]),
        )
        for each in found
    ]
    _print_table(console, ("schedule", "placement", "chunks>", "slices>", "options", "paper"), rows)
    text = " auto tries all of them and searches beyond; FILE.py:FUNCTION, FILE.csv and FILE.arrow are your own"
    console.print(text, soft_wrap=True, highlight=False)


def _run(folder: Path) -> dict[str, Any]:
    """A line of `pentad runs`; a run that this version cannot read is listed as unreadable."""
    from pentad.orchestrator.control.control_client import NotLive, connect, ended

    path = folder / METRICS if (folder / METRICS).exists() else folder / CONFIG
    found = {"name": folder.name, "state": "unreadable", "step": 0, "steps": 0, "loss": None}
    try:
        try:
            with connect(folder) as client:
                status = client.status(1.0)
        except NotLive as error:
            status = error.last
        except PentadError:  # live, but it does not answer, or only on another machine
            status = ended(folder) | {"state": "running"}
        found |= {key: status[key] for key in ("state", "step", "steps", "loss")}
    except (PentadError, OSError):
        pass
    return {**found, "time": path.stat().st_mtime}


def _print_table(console: Console, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Right-aligns columns whose head ends in '>'; lines are never wrapped where a program reads them."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for head in heads:
        table.add_column(head.rstrip(">"), justify="right" if head.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        console.width = max(console.width, sum(2 + max(map(len, column)) for column in zip(heads, *rows, strict=True)))
    console.print(table)
