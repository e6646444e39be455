"""`pentad calibrate`: measures rates once, for plans."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from pentad.orchestrator.cli.arguments import Json, Words, split_words
from pentad.schedules.ir.errors import PentadError


def calibrate(
    words: Words = None,
    run: Annotated[
        str | None,
        Option(
            "--from",
            metavar="RUN",
            help="Measure nothing, but refine the table with the times of a run's instructions.",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="The table's file (default: this GPU's in ~/.cache/pentad/rates).")] = None,
    as_json: Json = False,
) -> None:
    """Measure GPUs, links and kernels, so that plans predict with their figures.

    Kernels are measured at the shapes of CONFIG's model, here or on two nodes of its cluster.
    """
    if run is not None:
        if words:
            raise PentadError(f"--from is {run} beside '{words[0]}': expected no configuration")
        return _refine(run, out, as_json=as_json)
    from pentad.orchestrator.calibration.calibrate import calibrate as measure
    from pentad.orchestrator.calibration.calibrate import with_earlier
    from pentad.orchestrator.calibration.view import show_table
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.gpus.rate_table import place_of, require_place, write_table

    began, config = time.monotonic(), load(*split_words(words))
    require_place(out or place_of("table"))
    table = measure(config, _progress)
    path = out or place_of(table.gpu)
    write_table(with_earlier(table, path), path)
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps({"path": str(path), "seconds": seconds, **table.model_dump(mode="json")}))
    else:
        show_table(table, Console())
        use = f"cluster.rates={path} has plans use it" if out else f"plans use it from now on ({path})"
        Console().print(f" measured in {seconds:.0f} s: {use}", soft_wrap=True, highlight=False, markup=False)


def _refine(run: str, out: Path | None, *, as_json: bool) -> None:
    from pentad.orchestrator.calibration.from_run import refined_by
    from pentad.orchestrator.calibration.view import show_refined
    from pentad.orchestrator.gpus.rate_table import require_place, write_table

    found, path = refined_by(run)
    path = out or path
    require_place(path)
    write_table(found.table, path)
    if as_json:
        print(json.dumps({"path": str(path), **found.facts(), **found.table.model_dump(mode="json")}))
    else:
        show_refined(found, Console())
        Console().print(f" written to {path}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; yields the function to call with each measurement."""
    console = Console(stderr=True)
    columns = (TextColumn(" measuring"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
