"""`pentad logs` of a run folder: its steps and events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pentad.orchestrator.control.control_messages import ENDPOINT
from pentad.orchestrator.monitoring.display import step_line
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRIC_KEYS, METRICS, saved_config
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.ir.errors import printable

_POLL_SECONDS = 0.5


def show_run_log(folder: Path, *, followed: bool, as_json: bool) -> None:
    """Prints the steps and events of a run; if `followed`, until it ends or Ctrl-C."""
    if as_json and not followed:
        log = "".join(f"{line}\n" for _, line in _log_lines(folder))
        print(json.dumps({"run": folder.name, "folder": str(folder), "log": log}))
        return
    printed: set[tuple[float, str]] = set()
    with suppress(KeyboardInterrupt):
        while True:
            is_live = (folder / ENDPOINT).exists()
            for key in _log_lines(folder):
                if key not in printed:
                    printed.add(key)
                    print(key[1], flush=True)
            if not (followed and is_live):
                break
            time.sleep(_POLL_SECONDS)


def _log_lines(folder: Path) -> Iterator[tuple[float, str]]:
    """Lines for the steps and events of a run in order, each with its step."""
    steps = saved_config(folder).run.steps
    events = [row for row in read_lines(folder / JOURNAL, ["event", "time"]) if row["event"] != "place"]
    lines = [(row["step"] + 0.5, step_line(row, steps)) for row in read_lines(folder / METRICS, METRIC_KEYS)]
    step = 0
    for event in events:
        step = event.get("step", step)
        facts = [f"{key} {event[key]}" for key in ("rank", "how", "mesh", "step", "cause", "error") if key in event]
        clock = datetime.fromtimestamp(event["time"])
        line = f"{clock:%Y-%m-%d %H:%M:%S} {event['event']} {', '.join(facts)}".rstrip()
        lines.append((step, printable(line)))
    return iter(sorted(lines, key=lambda line: line[0]))
