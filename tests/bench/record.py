"""Where figures go: one JSON file, a part each, with how, when and on what they were taken."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray


def record(path: Path | None, part: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Prints what `measure` finds, without its rows, and puts it into the file; other parts there stay."""
    load = os.getloadavg()[0]
    found = measure()
    facts = {
        "command": f"PYTHONPATH=.typings:tests/support python {' '.join(sys.argv)}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {sys.platform}, Python {sys.version.split()[0]}, Ray {ray.__version__}",
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    print(json.dumps({part: facts | {k: v for k, v in found.items() if k != "rows"}}, indent=1), flush=True)
    if path is not None:
        there = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(there | {part: facts | found}, indent=1) + "\n")
