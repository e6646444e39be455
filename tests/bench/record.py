"""JSON files of results, with the command, date and machine of each measurement."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def stamp(machine: str = "") -> dict[str, str]:
    """What a result needs to be reproduced; `machine` defaults to a description of the CPUs and of the versions."""
    if not machine:
        used = {each.name: f"{each.name} {each.version}" for each in distributions() if each.name in ("torch", "ray")}
        python = f"Python {sys.version.split()[0]}"
        machine = ", ".join([f"{os.cpu_count()} cores", sys.platform, python, *used.values()])
    return {
        "command": f"PYTHONPATH=.typings:tests/support python {' '.join(sys.argv)}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": machine,
    }


def with_load(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement with its stamp and the machine's load average before and after it."""
    before = os.getloadavg()[0]
    results = measure()
    return {**stamp(), "load_before_and_after": [round(before, 1), round(os.getloadavg()[0], 1)], **results}


def write(path: Path | None, results: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def record(path: Path | None, section: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Prints the measurement without its rows, and replaces this section of the file."""
    results = with_load(measure)
    print(json.dumps({section: {k: v for k, v in results.items() if k != "rows"}}, indent=1), flush=True)
    if path is not None:
        existing = json.loads(path.read_text()) if path.exists() else {}
        write(path, existing | {section: results})
