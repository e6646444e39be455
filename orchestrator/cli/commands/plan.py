"""`pentad plan`: what would run, or with --search what would run best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from typer import Option

from pentad.orchestrator.cli.arguments import MOST_GPUS, Json, Words, split_words
from pentad.schedules.ir.errors import PentadError


def plan(
    words: Words = None,
    device: Annotated[Literal["cpu", "cuda"] | None, Option(help="Target device (default: as found here).")] = None,
    search: Annotated[
        bool,
        Option(
            "--search",
            help="Find the fastest plans over all meshes and keys that the command line does not set.",
        ),
    ] = False,
    gpus: Annotated[
        int | None, Option(min=1, max=MOST_GPUS, help="Search on this many GPUs (default: those of the mesh).")
    ] = None,
    memory: Annotated[
        float | None,
        Option(min=0.001, help="GiB per device (default: those of cluster.gpu, of this machine, or of an H200)."),
    ] = None,
    pool: Annotated[
        list[int] | None, Option(min=1, help="Also show how the data balances on N dp x ep x cp ranks.")
    ] = None,
    draws: Annotated[
        int | None,
        Option(
            min=2, max=1000, help="Also simulate N steps with random deviations; print their 5th to 95th percentile."
        ),
    ] = None,
    html: Annotated[Path | None, Option(help="Write a page with each rank's memory over a step.")] = None,
    trace: Annotated[
        Path | None,
        Option(help="Write a trace of the simulated step for Perfetto (.json.gz), with messages inside layers."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what would run: mesh, memory, traffic and predicted time.

    The exit status is 1 if it does not fit or has no data.
    """
    file, overrides = split_words(words)
    if search or gpus is not None:
        alone = {"--pool": pool and pool[0], "--draws": draws, "--html": html, "--trace": trace}
        for name, given in alone.items():
            if given:
                raise PentadError(f"{name} is {given}: expected none with --search or --gpus")
        return _search(file, overrides, gpus, memory, as_json=as_json)
    from pentad.orchestrator.api.plans import planned
    from pentad.orchestrator.cli.show_schedule import output_file, write
    from pentad.orchestrator.config.config import load

    found = planned(load(file, overrides), device, memory, pool or (), draws or 0)
    if html is not None:
        write("--html", html, found.memory_page())
    if trace is not None:
        with output_file("--trace", trace) as path:
            found.write_trace(path)
    if as_json:
        print(json.dumps(found.facts()))
    else:
        Console().print(found, crop=False)
    return int(not found.ok)


def _search(file: Path | None, overrides: list[str], gpus: int | None, memory: float | None, *, as_json: bool) -> int:
    from pentad.orchestrator.cli.show_search import Command, show_search
    from pentad.orchestrator.planning.fit import device_memory
    from pentad.orchestrator.planning.hardware import gpu_of

    command = Command(file, overrides)
    room = device_memory("cuda", memory, gpu=gpu_of(command.config.cluster))
    return show_search(command, gpus or command.config.mesh.size, room, Console(), as_json=as_json)
