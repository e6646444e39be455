"""`pentad status`, `page`, `pause`, `checkpoint`, `abort`: shows what a run is doing, and sends it requests."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.control.control_client import NotLive, connect
from pentad.orchestrator.monitoring.display import STATE_COLOURS
from pentad.orchestrator.monitoring.run_state import OVER
from pentad.orchestrator.monitoring.tables import fitted_table, with_rest
from pentad.orchestrator.planning.formatting import format_duration, format_number
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Coordinates

_OUTCOMES = {
    "pause": "paused after step {step}",
    "resume": "continues from step {step}",
    "checkpoint": "saved at step {step}",
    "stop": "stopped after step {step}, with a checkpoint",
    "abort": "aborted at step {step}, without a checkpoint",
}
_LATE_SECONDS = 3.0  # older heartbeats are highlighted
_POLL_SECONDS = 0.1
_MAX_ROWS = 64  # rows of ranks, unless the terminal says how many fit


def show_status(run: Path, console: Console, *, watch: bool, as_json: bool, timeout_seconds: float) -> None:
    """Prints the status of a run, live or not; with `watch` again after each change, until it ends or Ctrl-C."""
    statuses = _statuses(run, watch, timeout_seconds)
    if as_json:
        for status in statuses:
            print(json.dumps(status), flush=True)
    elif watch and console.is_terminal and not console.is_dumb_terminal:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            for status in statuses:
                live.update(status_view(status, max(1, console.height - 9)), refresh=True)
    else:
        with suppress(KeyboardInterrupt):
            for status in statuses:
                console.print(status_view(status, _MAX_ROWS))


def show_page(run: Path, *, as_json: bool, timeout_seconds: float) -> None:
    """Prints the address of a run's page, with its token. The page of a run that is not live is served here, from its
    folder, until Ctrl-C."""
    try:
        with connect(run) as client:
            url = client.status(timeout_seconds)["endpoints"].get("page")
            if url is None:
                raise PentadError(f"run {run.name} has no page yet: expected one that has started")
            _print_page(run, f"{url}?token={client.token}", as_json)
    except NotLive as error:
        from pentad.orchestrator.page.ended_run import EndedRun
        from pentad.orchestrator.page.page_server import PageServer

        token = secrets.token_urlsafe(16)
        with closing(PageServer(EndedRun(run), "127.0.0.1", 0, token, None)) as server, Interrupts() as interrupts:
            interrupts.stop = lambda: None  # KeyboardInterrupt would get lost in a finalizer that happens to run
            _print_page(run, f"{server.url}?token={token}", as_json)
            state = f"run {run.name} is {error.last['state']}: this command serves its page until Ctrl-C"
            Console(stderr=True).print(Text(state, "dim"), soft_wrap=True)
            while not interrupts.requested:
                time.sleep(_POLL_SECONDS)


def _print_page(run: Path, address: str, as_json: bool) -> None:
    print(json.dumps({"run": run.name, "page": address}) if as_json else address, flush=True)


def show_request(run: Path, verb: str, console: Console, *, as_json: bool, timeout_seconds: float) -> None:
    """Sends a live run 'pause', 'resume', 'checkpoint', 'stop' or 'abort', and prints the outcome.

    Raises PentadError on timeout.
    """
    with connect(run) as client:
        outcome = client.request(verb, timeout_seconds)
    if as_json:
        print(json.dumps(outcome))
    else:
        sentence = _OUTCOMES[verb].format(**outcome)
        console.print(Text.assemble((f" {outcome['run']}", "bold"), f" {sentence}"), soft_wrap=True)


def status_view(status: dict[str, Any], rows: int) -> RenderableType:
    """A status as a table: the run, which rank a stalled run waits for, and at most `rows` ranks."""
    state, program = status["state"], status["program"][:12]
    left = status["seconds_left"] if state == "running" else None
    rest = f"  {format_duration(max(1, round(left)))} left" if left else ""
    head = Text.assemble(
        (f" {status['run']}", "bold"),
        "  ",
        (state, STATE_COLOURS.get(state, "")),
        f"  step {status['step']}/{status['steps']}{rest}  generation {status['generation']}",
    )
    if status["spares"]:
        head.append(f"  spares {status['spares']}")
    schedule = Text(f" {status['mesh']}  {status['schedule']}  {program}", "dim")
    loss, pace = format_number(status["loss"], ".4f"), format_number(status["tokens_per_second"], ",.0f")
    parts: list[RenderableType] = [head, schedule, Text(f" loss {loss}  {pace} tokens/s")]
    parts += [Text(f" {sentence}") for sentence in evaluation_sentences(status)]
    if status["verdict"]:
        parts.append(Text(f" {status['verdict']}", "bold yellow"))
    if state in OVER:
        return Group(*parts)
    if status["ranks"]:
        parts += [Text(), ranks_table(status["ranks"], rows)]
    for name, endpoint in sorted(status["endpoints"].items()):
        parts.append(Text.assemble((f" {name:<10}", "dim"), endpoint))
    return Group(*parts)


def evaluation_sentences(status: dict[str, Any]) -> Iterator[str]:
    """'evaluation after 20 steps: wiki 3.1416  next after step 40'"""
    found, following = status["evaluations"], status["next_evaluation"]
    upcoming = "" if following is None else f"next after {following} steps"
    if found:
        losses = "  ".join(f"{each['data']} {format_number(each['loss'], '.4f')}" for each in found)
        yield "  ".join(filter(None, [f"evaluation after {found[0]['step']} steps: {losses}", upcoming]))
    elif upcoming:
        yield f"evaluation: {upcoming}"


def ranks_table(ranks: list[dict[str, Any]], rows: int) -> Table:
    """One row per rank; if not all fit, ranks with a problem come first."""
    heads = ("rank>", "place", "node", "device", "pid>", "state", "step>", "instruction", "heartbeat>")
    healthy = ("running", "waiting", "idle")
    shown = ranks if len(ranks) <= rows else sorted(ranks, key=lambda rank: rank["state"] in healthy)[:rows]
    cells = []
    for rank in shown:
        age = rank["heartbeat_age_seconds"]
        where = (str(Coordinates(**rank["coordinates"])), Text(rank["node"]))
        process = (f"GPU {rank['gpu']}" if rank["gpu"] >= 0 else "CPU", str(rank["pid"]) if rank["pid"] >= 0 else "-")
        state = Text(rank["state"], STATE_COLOURS.get(rank["state"], ""))
        step = str(rank["step"]) if rank["step"] >= 0 else "-"
        heartbeat = Text(f"{age:.1f} s", "bold red" if age >= _LATE_SECONDS else "dim")
        cells.append((str(rank["rank"]), *where, *process, state, step, Text(rank["instruction"]), heartbeat))
    return with_rest(fitted_table(heads, cells, 0, drop=()), len(ranks))


def _statuses(run: Path, watch: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """The statuses of a run; if it is not live, or ends meanwhile, the last one comes from its folder."""
    try:
        with connect(run) as client:
            if watch:
                yield from client.watch(seconds)
            else:
                yield client.status(seconds)
    except NotLive as ended:
        yield ended.last
