"""`pentad status` and its siblings: what a run does now, and what people ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.control.control_client import NotLive, connect
from pentad.orchestrator.monitoring.display import COLOURS, OVER
from pentad.orchestrator.planning.quantities import number
from pentad.schedules.spec.mesh import Coordinates

_SAID = {
    "pause": "paused after step {step}",
    "resume": "goes on from step {step}",
    "checkpoint": "saved at step {step}",
    "abort": "ended at step {step}, without a checkpoint",
}
_OLD_SECONDS = 3.0  # a heartbeat of that age is pointed out
_MOST_ROWS = 64  # of ranks, where the terminal does not say how many fit


def show_status(run: str, console: Console, *, watch: bool, as_json: bool, timeout_seconds: float) -> None:
    """Prints the status of a run, live or not; with `watch` again after each change, until it is over or Ctrl-C."""
    found = _statuses(run, watch, timeout_seconds)
    if as_json:
        for status in found:
            print(json.dumps(status), flush=True)
    elif watch and console.is_terminal and not console.is_dumb_terminal:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            for status in found:
                live.update(status_view(status, max(1, console.height - 9)), refresh=True)
    else:
        with suppress(KeyboardInterrupt):
            for status in found:
                console.print(status_view(status, _MOST_ROWS))


def ask(run: str, verb: str, console: Console, *, as_json: bool, timeout_seconds: float) -> None:
    """Lets a live run 'pause', 'resume', 'checkpoint' or 'abort', and prints what came of it.

    Raises PentadError when it is not done in time.
    """
    with connect(run) as client:
        outcome = getattr(client, verb)(timeout_seconds)
    if as_json:
        print(json.dumps(outcome))
    else:
        said = _SAID[verb].format(**outcome)
        console.print(Text.assemble((f" {outcome['run']}", "bold"), f" {said}"), soft_wrap=True)


def status_view(status: dict[str, Any], most: int) -> RenderableType:
    """What a person sees of a status: the run, whom it waits for, and at most `most` ranks."""
    state, hashed = status["state"], status["program"][:12]
    head = Text.assemble(
        (f" {status['run']}", "bold"),
        "  ",
        (state, COLOURS.get(state, "")),
        f"  step {status['step']}/{status['steps']}  generation {status['generation']}",
    )
    what = Text(f" {status['mesh']}  {status['schedule']}  {hashed}", "dim")
    pace = f" loss {number(status['loss'], '.4f')}  {number(status['tokens_per_second'], ',.0f')} tokens/s"
    parts: list[RenderableType] = [head, what, Text(pace)]
    if status["verdict"]:
        parts.append(Text(f" {status['verdict']}", "bold yellow"))
    if state in OVER:
        return Group(*parts)
    if status["ranks"]:
        parts += [Text(), ranks_table(status["ranks"], most)]
    for name, place in sorted(status["endpoints"].items()):
        parts.append(Text.assemble((f" {name:<10}", "dim"), place))
    return Group(*parts)


def ranks_table(ranks: list[dict[str, Any]], most: int) -> Table:
    """A row a rank; where not all fit, those in trouble come first."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for head in ("rank>", "place", "node", "device", "pid>", "state", "step>", "instruction", "heartbeat>"):
        table.add_column(head.rstrip(">"), justify="right" if head.endswith(">") else "left", no_wrap=True)
    calm = ("running", "waiting", "idle")
    shown = ranks if len(ranks) <= most else sorted(ranks, key=lambda rank: rank["state"] in calm)[:most]
    for rank in shown:
        age = rank["heartbeat_age_seconds"]
        table.add_row(
            str(rank["rank"]),
            str(Coordinates(**rank["coordinates"])),
            Text(rank["node"]),
            f"GPU {rank['gpu']}" if rank["gpu"] >= 0 else "CPU",
            str(rank["pid"]) if rank["pid"] >= 0 else "-",
            Text(rank["state"], COLOURS.get(rank["state"], "")),
            str(rank["step"]) if rank["step"] >= 0 else "-",
            Text(rank["instruction"]),
            Text(f"{age:.1f} s", "bold red" if age >= _OLD_SECONDS else "dim"),
        )
    if len(ranks) > most:
        table.add_row("", Text(f"and {len(ranks) - most} more", "dim"))
    return table


def _statuses(run: str, watch: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """The run's statuses; of one that is not live, or ends meanwhile, the last is what its folder knows."""
    try:
        with connect(run) as client:
            if watch:
                yield from client.watch(seconds)
            else:
                yield client.status(seconds)
    except NotLive as over:
        yield over.last
