"""`pentad sweep`: measures many configurations, one short trial each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from pentad.orchestrator.cli.arguments import Json, Words, split_words


def sweep(
    words: Words = None,
    search: Annotated[
        int, Option(min=0, max=100, metavar="N", help="Try the search's N best meshes at each point of the grid.")
    ] = 0,
    gpus: Annotated[
        list[int] | None, Option(min=1, max=2**14, help="With --search: the number of GPUs; may be repeated.")
    ] = None,
    steps: Annotated[int, Option(min=2, help="Steps of a trial; the first is not counted.")] = 10,
    deadline: Annotated[float, Option(min=1, help="Seconds after which a trial is ended.")] = 600.0,
    out: Annotated[
        Path | None, Option(help="The sweep's folder (default: sweeps/ and run.name), whose contents are kept.")
    ] = None,
    retry: Annotated[bool, Option("--retry", help="Run failed trials again.")] = False,
    as_json: Json = False,
) -> int:
    """Run a grid of configurations, such as mesh.pp=2,4, as short trials beside each other.

    Each trial ends by its deadline and is a row in results.arrow and results.csv, with the cause if it failed. The
    same command resumes an interrupted sweep. The exit status is 1 if no trial succeeds.
    """
    from pentad.orchestrator.sweep.free_devices import find_free_devices
    from pentad.orchestrator.sweep.grid import grid
    from pentad.orchestrator.sweep.sweep import PAGE, RUNS
    from pentad.orchestrator.sweep.sweep import sweep as run
    from pentad.orchestrator.sweep.trials import SweepRequest, first_valid, trials_of
    from pentad.orchestrator.sweep.view import progress, show_sweep
    from pentad.schedules.ir.errors import PentadError

    if gpus and not search:
        raise PentadError(f"--gpus is {gpus[0]}: expected it with --search; a grid says its meshes")
    file, overrides = split_words(words)
    points = grid(overrides)
    config = first_valid(file, points, searched=search > 0)
    folder = out or Path("sweeps") / config.run.name
    free = find_free_devices(config.cluster)
    with Console(stderr=True).status("planning"):
        trials = trials_of(SweepRequest(file, points, steps, search, gpus or ()), free, folder / RUNS)
    title = f"Sweep of {config.run.name}"
    with progress(len(trials)) as report:
        found = run(trials, free, folder, title, deadline, report, retry=retry)
    if as_json:
        rows = [row._asdict() for row in found.rows]
        print(json.dumps({"folder": str(folder), "ran": found.ran, "page": str(folder / PAGE), "trials": rows}))
    else:
        show_sweep(found, str(folder / PAGE), Console())
    return int(not any(row.outcome == "measured" for row in found.rows))
