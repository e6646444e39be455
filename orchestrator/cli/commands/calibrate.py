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


def calibrate(
    words: Words = None,
    out: Annotated[Path | None, Option(help="The table (default: one for this GPU in ~/.cache/pentad/rates).")] = None,
    as_json: Json = False,
) -> None:
    """Measure GPUs and links, here or on two nodes of CONFIG's cluster, and write the rates that plans use."""
    from pentad.orchestrator.calibration.calibrate import calibrate as measure
    from pentad.orchestrator.calibration.view import show_table
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.gpus.rate_table import place_of, require_place, write_table

    began, config = time.monotonic(), load(*split_words(words))
    require_place(out or place_of("table"))
    table = measure(config, _progress)
    path = out or place_of(table.gpu)
    write_table(table, path)
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps({"path": str(path), "seconds": seconds, **table.model_dump(mode="json")}))
    else:
        show_table(table, Console())
        use = f"cluster.rates={path} has plans use it" if out else f"plans use it from now on ({path})"
        Console().print(f" measured in {seconds:.0f} s: {use}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; yields the function to call with each measurement."""
    console = Console(stderr=True)
    columns = (TextColumn(" measuring"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
