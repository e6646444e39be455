"""`pentad checkpoint list`, `verify` and `prune`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from pentad.orchestrator.cli.show_lists import clock, print_table
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS, best_of
from pentad.orchestrator.monitoring.runfolder import EVALUATIONS, find_checkpoints, is_checkpoint, resolve_run
from pentad.orchestrator.planning.formatting import counted, format_bytes
from pentad.orchestrator.records.checkpoint_places import CONFIG, checkpoints_in, home_of, saved_config
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.records.run_lock import locked
from pentad.orchestrator.recovery.retention import kept_steps
from pentad.schedules.ir.errors import PentadError, printable
from pentad.schedules.ir.regular_files import expanded
from pentad.workers.checkpoint.checkpoint import has_manifest
from pentad.workers.checkpoint.location import Location, location
from pentad.workers.checkpoint.retention import CheckpointEntry, delete_checkpoint, listed, superseded, verified


def show_list(run: str, console: Console, *, as_json: bool) -> None:
    """Lists the checkpoints of a run, oldest first."""
    root = find_checkpoints(run, "RUN")
    home, entries = root.parent, listed(root)
    notes = _notes(_folder(run, root), [entry.step for entry in entries if entry.state == "complete"])
    rows = [_row(entry, notes.get(entry.step, ()) if entry.state == "complete" else ()) for entry in entries]
    if as_json:
        print(json.dumps({"run": home.name, "folder": str(root), "checkpoints": rows}))
    elif not rows:
        print(f"no checkpoints in {root}")
    else:
        heads = ("step>", "saved", "size>", "state", "kept as", "problem")
        keys = ("step", "time", "bytes", "state", "kept_as", "problem")
        forms: dict[str, Callable[[Any], str]] = {"time": clock, "bytes": format_bytes, "kept_as": ", ".join}
        cells = [tuple(forms.get(key, str)(row[key]) for key in keys) for row in rows]
        print_table(console, heads, cells, wrapped="problem")


def show_verify(run: str, *, as_json: bool) -> int:
    """Verifies one or all checkpoints of a run and prints a line for each; returns 1 if any is not intact."""
    folder = location(run)
    if is_checkpoint(folder):
        home, entries = folder.absolute().parent.parent, [e for e in listed(folder.parent) if e.folder == folder]
    else:
        root = find_checkpoints(run, "RUN")
        home, entries = root.parent, [each for each in listed(root) if each.state not in ("incomplete", "refused")]
    if not entries:
        raise PentadError(f"RUN is '{run}', which has no checkpoint: expected at least one")
    rows = []
    for entry in map(verified, entries):
        if entry.state == "damaged" and not has_manifest(entry.folder):  # deleted meanwhile by a live run
            continue
        rows.append(_row(entry))
        if not as_json:
            print(_sentence(entry), flush=True)
    intact = all(row["state"] == "complete" for row in rows)
    if as_json:
        print(json.dumps({"run": home.name, "intact": intact, "checkpoints": rows}))
    return 0 if intact else 1


def show_prune(run: str, *, dry_run: bool, as_json: bool) -> None:
    """Deletes the checkpoints that a run would not keep. Raises PentadError if the run is live, or no checkpoint is
    intact."""
    home = resolve_run(run)
    with locked(home, f"RUN is '{run}', which is running (process {{holder}}) and deletes them itself"):
        config, rows = saved_config(home), read_lines(home / EVALUATIONS, EVAL_KEYS)
        gone = superseded(checkpoints_in(home), config.checkpoint.keep, lambda saved: kept_steps(config, saved, rows))
        for entry in gone if not dry_run else ():
            delete_checkpoint(entry.folder)
    size = sum(entry.bytes for entry in gone)
    if as_json:
        facts = {"run": home.name, "dry_run": dry_run, "bytes": size}
        print(json.dumps({**facts, "deleted": [_row(entry) for entry in gone]}))
        return
    for entry in gone:
        print(f"{'would delete' if dry_run else 'deleted'} {entry.folder.name} ({entry.state})")
    print(f"{counted(len(gone), 'checkpoint')}, {format_bytes(size)}")


def _folder(run: str, root: Location) -> Path:
    """The folder of a run, or what describes the checkpoints under `root`."""
    found = (path for path in (expanded(run), Path("runs") / run) if (path / CONFIG).is_file())
    return next(found, None) or home_of(root / "any")


def _row(entry: CheckpointEntry, kept_as: Iterable[str] = ()) -> dict[str, Any]:
    keys = ("step", "time", "bytes", "state", "problem")
    return {**{key: getattr(entry, key) for key in keys}, "kept_as": [*kept_as], "folder": str(entry.folder)}


def _notes(home: Path, saved: Collection[int]) -> dict[int, list[str]]:
    """Why checkpoints of a run are kept besides the newest ones, by step."""
    if not (home / CONFIG).is_file():
        return {}
    section = saved_config(home).checkpoint
    best = best_of(read_lines(home / EVALUATIONS, EVAL_KEYS), section.keep_best, saved)
    found: dict[int, list[str]] = {best.step: ["best"]} if best else {}
    for step in saved:
        if section.keep_every and step and step % section.keep_every == 0:
            found.setdefault(step, []).append("milestone")
    return found


def _sentence(entry: CheckpointEntry) -> str:
    if entry.state == "complete":
        return f"{entry.folder.name}: intact, {format_bytes(entry.bytes)}"
    return printable(f"{entry.folder.name}: {entry.state}: {entry.problem}")
