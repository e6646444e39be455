"""A sweep on a terminal: a line per trial as it ends, then a table with the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.planning.formatting import format_bytes, format_duration, format_percent
from pentad.orchestrator.sweep.page import TEXTS
from pentad.orchestrator.sweep.results import TrialRow, best_first
from pentad.orchestrator.sweep.sweep import Report, Sweep, SweepProgress


@contextmanager
def progress(trials: int) -> Iterator[Report]:
    """A progress bar on stderr, if that is a terminal, and a line for each trial that ends."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(" {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=trials)

        def report(done: SweepProgress) -> None:
            text = f"{done.done} of {trials} trials, {done.running} running"
            bar.update(task, completed=done.done, description=text)
            if done.row is not None:
                console.print(Text(f" {line_of(done.row)}"), soft_wrap=True)

        yield report


def line_of(row: TrialRow) -> str:
    """A line such as 'dp2 x pp2, 1f1b, ...: 12 ms a step, predicted 11 ms', or with the reason why it was not
    measured."""
    name = row.layout or row.settings or row.command
    if row.outcome != "measured":
        return f"{name}: {TEXTS[row.outcome]}: {row.cause}"
    times = format_duration(row.step_seconds), format_duration(row.predicted_seconds)
    return f"{name}: {times[0]} a step, predicted {times[1]}"


def show_sweep(found: Sweep, page: str, console: Console) -> None:
    best = best_first(found.rows)
    if best:
        columns = _columns(best)
        drop = ("memory", "of the best", "predicted", "model")
        console.print(
            fitted_table(
                [*columns], [*zip(*columns.values(), strict=True)], console.width, drop=drop, wrapped=["layout"]
            )
        )
    for row in found.rows:
        if row.outcome != "measured":
            console.print(Text(f" {line_of(row)}", "dim" if row.outcome == "pruned" else "red"), soft_wrap=True)
    if best:
        console.print(Text(f" the fastest: {best[0].command}"), soft_wrap=True)
    known = len(found.rows) - found.ran
    before = f", {known} known or pruned" if known else ""
    console.print(Text(f" {found.ran} trials ran{before}: {page}"), soft_wrap=True)


def _columns(rows: Sequence[TrialRow]) -> dict[str, list[str]]:
    """The cells of each column by head, without columns that are unknown in all rows, or a model that all share."""
    most = max(row.tokens_per_second or 0.0 for row in rows)
    found = {
        "model": [row.model for row in rows],
        "layout": [row.layout for row in rows],
        "tokens/s>": [f"{row.tokens_per_second or 0.0:,.0f}" for row in rows],
        "of the best>": [format_percent((row.tokens_per_second or 0.0) / most) for row in rows],
        "MFU>": [format_percent(row.mfu) for row in rows],
        "a step>": [format_duration(row.step_seconds) for row in rows],
        "predicted>": [format_duration(row.predicted_seconds) for row in rows],
        "memory>": [format_bytes(row.peak_bytes) if row.peak_bytes else "-" for row in rows],
    }
    return {
        head: cells for head, cells in found.items() if head != "model" or len(set(cells)) > 1 if set(cells) != {"-"}
    }
